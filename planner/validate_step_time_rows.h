#pragma once
// One row of data/published as a run: model, machine, software. The text cells are what people wrote; what they leave
// out is a rule of this file, stated in docs/step-time.md.

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "planner/csv_table.h"
#include "planner/validate_step_time.h"

namespace zeroplan {

class Cells;

/// What a micro-batch or a sequence that the row does not state is taken for.
enum class Unstated : std::uint8_t { refused, one_token };

/// Reads rows; keeps models, which many rows share.
class PublishedRows {
 public:
  explicit PublishedRows(const CsvTable& table) : table_(table) {}
  /// Throws InputError with the reason when a row cannot be predicted.
  MeasuredStep read(const CsvTable::Row& row);
  /// The run alone, as for rows without a measured step: `measured` stays 0. A model of which the row states no shape
  /// is the catalog's of that name. Throws InputError with the reason.
  MeasuredStep read_run(const CsvTable::Row& row, Unstated unstated);
  /// "Llama3-8B, 8 x H100-96GB, torchtitan (FSDP2), 2 x 8192".
  std::string describe(const CsvTable::Row& row) const;

 private:
  void read_engine(const Cells& cells, MeasuredStep& step);
  /// Of the row's shape, else the catalog's of its name.
  std::shared_ptr<const ModelSpec> stated_or_known_model(const Cells& cells);
  std::shared_ptr<const ModelSpec> model_of(const Cells& cells, const std::string& config);

  const CsvTable& table_;
  std::map<std::string, std::shared_ptr<const ModelSpec>> models_;
};

/// Typed access to the cells of one row.
class Cells {
 public:
  Cells(const CsvTable& table, const CsvTable::Row& row) : table_(table), row_(row) {}
  /// Whether the row has a cell for each column.
  bool whole() const { return row_.cells.size() == table_.columns(); }
  /// Empty when not stated or when there is no such column.
  const std::string& text(std::string_view column) const;
  bool stated(std::string_view column) const { return !text(column).empty(); }
  bool contains(std::string_view column, std::string_view part) const;
  /// Throws InputError "<column> not stated" or that it is no number.
  double number(std::string_view column) const;
  double number(std::string_view column, double otherwise) const;
  std::int64_t integer(std::string_view column) const;
  std::int64_t integer(std::string_view column, std::int64_t otherwise) const;

 private:
  const CsvTable& table_;
  const CsvTable::Row& row_;
};

/// The config.json that a row's architecture cells amount to. GPT models of which only the size is stated get the
/// shape h = 128 layers, 12 layers h^2 parameters.
std::string config_of(const Cells& cells);
/// The catalog's model of the row's name, or nothing.
std::optional<ModelSpec> catalog_model_of(const Cells& cells);
/// `gpu`, `gpus_per_node`, `n_gpus`, `interconnect`; `card` in place of the catalog's GPU.
MachineSpec machine_of(const Cells& cells, const std::optional<GpuSpec>& card = std::nullopt);

}  // namespace zeroplan
