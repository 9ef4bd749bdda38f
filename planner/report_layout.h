#pragma once
// Pieces of a text report: tables, bars, colours.

#include <string>
#include <string_view>
#include <vector>

#include "planner/prediction.h"
#include "planner/report.h"

namespace zeroplan {

enum class Align : std::uint8_t { left, right };

/// Columns as wide as their longest cell, two blanks apart.
class TextTable {
 public:
  struct Column {
    std::string title;
    Align align = Align::right;
  };
  explicit TextTable(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void add(std::vector<std::string> cells);
  /// Lines with two blanks before them.
  std::string text() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

enum class Ink : std::uint8_t { bold, good, bad, dim };
std::string inked(std::string_view text, Ink ink, const ReportStyle& style);

/// "[PPPPOOOOAAAA....]": one letter an owner, what is free as dots; `width` cells for the capacity.
std::string memory_bar(const TierMemory& memory, int width, const ReportStyle& style);
/// "P parameters 1.0, O optimizer 2.3 GiB".
std::string memory_legend(const TierMemory& memory);
/// "#####     ": `part` of `width` cells.
std::string share_bar(double part, int width, const ReportStyle& style);

/// The tiers that are used, by name: "GPU", "host", "NVMe".
struct NamedTier {
  std::string_view name;   // "GPU"
  std::string_view scope;  // "a GPU", "a node"
  const TierMemory* memory;
};
std::vector<NamedTier> tiers_of(const Prediction& prediction);
/// "gpu" -> "the memory of each GPU".
std::string_view tier_title(std::string_view key);

/// Parts shared by the reports: each ends with a line break.
std::string memory_section(const Prediction& prediction, const ReportStyle& style);
std::string time_section(const Prediction& prediction, const ReportStyle& style);
/// What is missing on each tier, margins aside, and a blank line; empty when all fits.
std::string overflow_section(const Prediction& prediction);
std::string phase_section(const StepTable& table, Seconds step, const ReportStyle& style);
std::string streams_section(const Simulation& simulation, Seconds step, const ReportStyle& style);
std::string busiest_section(const Simulation& simulation, const ReportStyle& style);
std::string simulated_line(const Simulation& simulation);
std::string assumptions_section(const std::vector<Assumption>& assumptions, const ReportStyle& style);
/// "4,290 tokens/s"; three digits below 1000.
std::string format_speed(double tokens_per_second);
/// "4 x A100-SXM4-80GB" or "16 nodes of 8 x H100-SXM5-80GB".
std::string gpus_text(const MachineSpec& machine);

}  // namespace zeroplan
