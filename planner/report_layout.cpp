#include "planner/report_layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>

namespace zeroplan {
namespace {

constexpr int kBarWidth = 40;

std::string_view escape_of(Ink ink) {
  switch (ink) {
    case Ink::bold:
      return "\x1b[1m";
    case Ink::good:
      return "\x1b[1;32m";
    case Ink::bad:
      return "\x1b[1;31m";
    case Ink::dim:
      return "\x1b[2m";
  }
  return "";
}

/// Background colours of a bar, one an owner in the order of the breakdown.
constexpr std::array<std::string_view, 6> kBarColours = {"\x1b[30;44m", "\x1b[30;42m", "\x1b[30;43m",
                                                         "\x1b[30;46m", "\x1b[30;45m", "\x1b[30;41m"};
constexpr std::string_view kReset = "\x1b[0m";

/// A letter an owner: its first that is not taken, upper case.
std::vector<char> letters_of(const TierMemory& memory) {
  std::vector<char> letters;
  for (const auto& [owner, bytes] : memory.breakdown) {
    char letter = '?';
    for (const char c : owner) {
      const char upper = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
      if (std::isalpha(static_cast<unsigned char>(c)) != 0 && std::ranges::find(letters, upper) == letters.end()) {
        letter = upper;
        break;
      }
    }
    letters.push_back(letter);
  }
  return letters;
}

std::string number_in_gib(Bytes bytes) { return fmt::format("{:.1f}", bytes.base() / kGiB); }

/// "arena_gaps" -> "arena gaps".
std::string title_of(std::string_view owner) {
  if (owner == "nccl") return "NCCL";
  std::string title(owner);
  std::ranges::replace(title, '_', ' ');
  return title;
}

/// Characters, not bytes: owners and machine names are ASCII, bars are not.
std::size_t shown_width(std::string_view text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0u) != 0x80u; }));
}

}  // namespace

void TextTable::add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }

std::string TextTable::text() const {
  std::vector<std::size_t> widths;
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    std::size_t width = shown_width(columns_[c].title);
    for (const auto& row : rows_) width = std::max(width, shown_width(row[c]));
    widths.push_back(width);
  }
  const auto line = [&](const auto& cell_of) {
    std::string result;
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      const std::string& cell = cell_of(c);
      const std::string blanks(widths[c] - shown_width(cell), ' ');
      result += "  " + (columns_[c].align == Align::left ? cell + blanks : blanks + cell);
    }
    result.erase(result.find_last_not_of(' ') + 1);
    return result + "\n";
  };
  std::string result = line([&](std::size_t c) -> const std::string& { return columns_[c].title; });
  for (const auto& row : rows_) result += line([&](std::size_t c) -> const std::string& { return row[c]; });
  return result;
}

std::string inked(std::string_view text, Ink ink, const ReportStyle& style) {
  if (!style.colour) return std::string(text);
  return fmt::format("{}{}{}", escape_of(ink), text, kReset);
}

std::string memory_bar(const TierMemory& memory, int width, const ReportStyle& style) {
  const std::vector<char> letters = letters_of(memory);
  const double whole = std::max(memory.capacity.base(), memory.peak.base());
  std::string bar = "[";
  double sum = 0;
  int drawn = 0;
  for (std::size_t i = 0; i < memory.breakdown.size(); ++i) {
    sum += memory.breakdown[i].second.base();
    const int end = std::clamp(static_cast<int>(std::lround(sum / whole * width)), drawn, width);
    const std::string cells(static_cast<std::size_t>(end - drawn), letters[i]);
    bar += style.colour && !cells.empty() ? fmt::format("{}{}{}", kBarColours[i % kBarColours.size()], cells, kReset)
                                          : cells;
    drawn = end;
  }
  for (; drawn < width; ++drawn) bar += style.unicode ? "·" : ".";
  return bar + "]";
}

std::string memory_legend(const TierMemory& memory) {
  constexpr double kShown = 0.05 * kGiB;  // less prints as 0.0
  const std::vector<char> letters = letters_of(memory);
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < memory.breakdown.size(); ++i) {
    const auto& [owner, bytes] = memory.breakdown[i];
    if (bytes.base() >= kShown) {
      parts.push_back(fmt::format("{} {} {}", letters[i], title_of(owner), number_in_gib(bytes)));
    }
  }
  return parts.empty() ? "all parts below 0.05 GiB" : fmt::format("{} GiB", fmt::join(parts, ", "));
}

std::string share_bar(double part, int width, const ReportStyle& style) {
  const int cells = static_cast<int>(std::lround(std::clamp(part, 0.0, 1.0) * width));
  std::string bar;
  for (int i = 0; i < cells; ++i) bar += style.unicode ? "█" : "#";
  return bar;
}

std::vector<NamedTier> tiers_of(const Prediction& prediction) {
  std::vector<NamedTier> tiers = {{"GPU", "a GPU", &prediction.gpu}};
  if (prediction.host) tiers.push_back({"host", "a node", &*prediction.host});
  if (prediction.nvme) tiers.push_back({"NVMe", "a node", &*prediction.nvme});
  return tiers;
}

std::string_view tier_title(std::string_view key) {
  if (key == "gpu") return "the memory of each GPU";
  if (key == "host") return "the host memory of each node";
  return "the NVMe of each node";
}

std::string memory_section(const Prediction& prediction, const ReportStyle& style) {
  std::string text = inked("Memory at the peak", Ink::bold, style) + "\n";
  for (const NamedTier& tier : tiers_of(prediction)) {
    const TierMemory& memory = *tier.memory;
    text += fmt::format("  {:<5}{} {} of {} {}", tier.name, memory_bar(memory, kBarWidth, style),
                        number_in_gib(memory.peak), format_gib(memory.capacity), tier.scope);
    if (memory.pinned.base() > 0) text += fmt::format(", {} of it pinned", format_gib(memory.pinned));
    text += fmt::format("\n       {}\n", memory_legend(memory));
    if (!memory.at_op.empty()) text += fmt::format("       peak at {}\n", memory.at_op);
  }
  return text;
}

/// Parts of a step below this come from rounding.
constexpr double kRounding = 1e-9;

std::string time_section(const Prediction& prediction, const ReportStyle& style) {
  const TimeBreakdown& time = prediction.time;
  const std::array<std::pair<std::string_view, Seconds>, 5> parts = {{
      {"forward and backward", time.compute},
      {"waiting for collectives", time.exposed_communication},
      {"waiting for offload", time.exposed_offload},
      {"optimizer", time.optimizer},
      {"idle", time.idle},
  }};
  std::string text = inked("Time of a step", Ink::bold, style) + fmt::format(": {}\n", format_seconds(prediction.step));
  for (const auto& [name, seconds] : parts) {
    const double part = seconds / prediction.step;
    if (part < kRounding) continue;
    const std::string bar = share_bar(part, kBarWidth, style);
    text += fmt::format("  {:<24} {:>8}  {:>5.1f} %{}{}\n", name, format_seconds(seconds), 100 * part,
                        bar.empty() ? "" : "  ", bar);
  }
  if (!prediction.limited_by.empty()) text += fmt::format("  limited by {}\n", prediction.limited_by);
  return text;
}

std::string assumptions_section(const std::vector<Assumption>& assumptions, const ReportStyle& style) {
  if (assumptions.empty()) return "";
  std::string text = inked("Assumed, because nobody said", Ink::bold, style) + "\n";
  for (const Assumption& a : assumptions) text += fmt::format("  {}: {} ({})\n", a.what, a.value, a.source);
  return text;
}

std::string format_speed(double tokens_per_second) {
  if (tokens_per_second >= 1000) return format_count(std::llround(tokens_per_second)) + " tokens/s";
  return fmt::format("{:.3g} tokens/s", tokens_per_second);
}

std::string gpus_text(const MachineSpec& machine) {
  const std::string node = fmt::format("{} x {}", machine.gpus_per_node, machine.gpu.name);
  return machine.nodes == 1 ? node : fmt::format("{} nodes of {}", machine.nodes, node);
}

std::string overflow_section(const Prediction& prediction) {
  std::string text;
  const auto look = [&](std::string_view tier, const TierMemory& memory) {
    if (memory.peak <= memory.capacity) return;
    text += fmt::format("Does not fit: {} missing in {}\n", format_gib(memory.peak - memory.capacity), tier);
  };
  look("the memory of each GPU", prediction.gpu);
  if (prediction.host) look("the host memory of each node", *prediction.host);
  if (prediction.nvme) look("the NVMe of each node", *prediction.nvme);
  return text.empty() ? text : text + "\n";
}

std::string phase_section(const StepTable& table, Seconds step, const ReportStyle& style) {
  TextTable rows({{"phase", Align::left},
                  {"stream", Align::left},
                  {"ops"},
                  {"busy"},
                  {"of the step"},
                  {"longest op", Align::left},
                  {"takes"}});
  for (const StepRow& row : table.rows) {
    rows.add({std::string(to_string(row.phase)), std::string(to_string(row.stream)), format_count(row.ops),
              format_seconds(row.busy), fmt::format("{:.1f} %", 100 * (row.busy / step)), row.longest,
              format_seconds(row.longest_duration)});
  }
  return inked("Streams by phase", Ink::bold, style) + " (they run side by side; each op as if alone)\n" + rows.text();
}

std::string streams_section(const Simulation& simulation, Seconds step, const ReportStyle& style) {
  TextTable rows(
      {{"stream", Align::left}, {"ops"}, {"busy"}, {"of the step"}, {"waits for ranks"}, {"slowed by sharing"}});
  const auto shown = [&](Seconds part) { return format_seconds(part / step < kRounding ? Seconds() : part); };
  for (int s = 0; s < kNumStreams; ++s) {
    const StreamTime& stream = simulation.streams[static_cast<std::size_t>(s)];
    if (stream.ops == 0) continue;
    rows.add({std::string(to_string(static_cast<Stream>(s))), format_count(stream.ops), format_seconds(stream.busy),
              fmt::format("{:.1f} %", 100 * (stream.busy / step)), shown(stream.wait), shown(stream.slowdown)});
  }
  return inked("Streams of rank 0", Ink::bold, style) + " (they run side by side)\n" + rows.text();
}

std::string busiest_section(const Simulation& simulation, const ReportStyle& style) {
  constexpr std::size_t kShownResources = 6;
  std::vector<ResourceUse> uses = simulation.resources;
  std::stable_sort(uses.begin(), uses.end(),
                   [](const ResourceUse& a, const ResourceUse& b) { return a.utilisation > b.utilisation; });
  TextTable rows({{"resource of the node", Align::left}, {"in use"}});
  for (std::size_t k = 0; k < std::min(uses.size(), kShownResources); ++k) {
    rows.add({uses[k].name, fmt::format("{:.1f} %", 100 * uses[k].utilisation)});
  }
  return inked("Busiest", Ink::bold, style) + "\n" + rows.text();
}

std::string simulated_line(const Simulation& simulation) {
  return fmt::format("{} timed ops a rank; {} of {} ranks played, {} events\n", format_count(simulation.ops),
                     simulation.simulated_ranks, simulation.ranks, format_count(simulation.events));
}

}  // namespace zeroplan
