// `nvidia-smi topo -m`: a header of device names and titles, a row a device, a legend, and the names of the NICs.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>

#include "models/error.h"
#include "models/topology_parts.h"

namespace zeroplan {
namespace {

constexpr int kMostNvlinks = 72;  // four times the 18 links of a Hopper or Blackwell GPU
constexpr std::string_view kUnknown = "N/A";
// Titles behind the devices, in this order; drivers before 450 print the first, before 530 the first two.
constexpr std::array<std::string_view, 3> kTitles{"CPU Affinity", "NUMA Affinity", "GPU NUMA ID"};

struct Word {
  std::string_view text;
  Connection kind;
};
// SOC is what drivers before 384 called SYS.
constexpr std::array<Word, 7> kWords{{{"X", Connection::self},
                                      {"PIX", Connection::pix},
                                      {"PXB", Connection::pxb},
                                      {"PHB", Connection::phb},
                                      {"NODE", Connection::node},
                                      {"SYS", Connection::sys},
                                      {"SOC", Connection::sys}}};

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

struct Line {
  int number = 0;
  std::string text;  // without escapes and line end
};

using Tokens = std::vector<std::string_view>;

Tokens tokens_of(std::string_view text) {
  Tokens tokens;
  std::size_t at = 0;
  while ((at = text.find_first_not_of(" \t", at)) != std::string_view::npos) {
    const std::size_t end = std::min(text.find_first_of(" \t", at), text.size());
    tokens.push_back(text.substr(at, end - at));
    at = end;
  }
  return tokens;
}

/// Drops terminal escapes (nvidia-smi underlines its header even into a file): ESC [ parameters letter.
std::string without_escapes(std::string_view text) {
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\x1b') {
      result += text[i];
      continue;
    }
    if (i + 1 < text.size() && text[i + 1] == '[') ++i;
    while (i + 1 < text.size() && (is_digit(text[i + 1]) || text[i + 1] == ';')) ++i;
    if (i + 1 < text.size() && is_letter(text[i + 1])) ++i;
  }
  return result;
}

/// Lines that are not blank, ended by LF or CR LF.
std::vector<Line> lines_of(std::string_view text) {
  std::vector<Line> lines;
  int number = 0;
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    std::string line = without_escapes(text.substr(0, end));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    ++number;
    while (!line.empty() && (line.back() == '\r' || line.back() == ' ' || line.back() == '\t')) line.pop_back();
    if (!line.empty()) lines.push_back({number, std::move(line)});
  }
  return lines;
}

bool is_gpu(std::string_view name) {
  return name.size() > 3 && name.starts_with("GPU") && std::ranges::all_of(name.substr(3), is_digit);
}
bool is_device_name(std::string_view name) {
  return is_letter(name[0]) && std::ranges::any_of(name, is_digit) && std::ranges::all_of(name, [](char c) {
           return is_letter(c) || is_digit(c) || c == '_' || c == '-' || c == '.' || c == ':';
         });
}

class MatrixReader {
 public:
  MatrixReader(std::string_view text, const std::string& file) : lines_(lines_of(text)), last_line_(1) {
    topology_.file = file;
    last_line_ += static_cast<int>(std::ranges::count(text, '\n'));
    if (text.ends_with('\n')) --last_line_;
  }

  NodeTopology read() {
    if (lines_.empty()) fail(1, "expected a header such as \"GPU0 GPU1 CPU Affinity\", found only escapes");
    read_header();
    read_rows();
    read_legends();
    check_symmetry();
    infer_pcie();
    return std::move(topology_);
  }

 private:
  [[noreturn]] void fail(int line, std::string_view message) const { fail_at(topology_.file, line, message); }

  void read_header() {
    const Line& line = lines_[at_++];
    const Tokens tokens = tokens_of(line.text);
    std::size_t next = 0;
    while (next < tokens.size() && tokens[next] != "CPU" && tokens[next] != "NUMA" && tokens[next] != "GPU") {
      add_device(line, tokens[next++]);
    }
    if (topology_.gpus.empty()) {
      fail(line.number, fmt::format("expected a header that begins with GPU0, found {}", found_text(line.text)));
    }
    while (next < tokens.size()) next = read_title(line, tokens, next);
    if (num_titles_ == 0) {
      fail(line.number,
           fmt::format("expected the column \"{}\" behind {}, found the end of the line", kTitles[0], names_.back()));
    }
    topology_.links.resize(names_.size() * names_.size());
  }

  void add_device(const Line& line, std::string_view token) {
    const std::string name(token);
    if (names_.empty() && !is_gpu(name)) {
      fail(line.number, fmt::format("expected a header that begins with GPU0, found {}", found_text(line.text)));
    }
    if (!is_device_name(name)) {
      fail(line.number, fmt::format("expected a device such as GPU0, NIC0 or mlx5_0, or \"{}\", found {}", kTitles[0],
                                    found_text(name)));
    }
    if (std::ranges::find(names_, name) != names_.end()) {
      fail(line.number, fmt::format("expected each device once, found the column {} twice", name));
    }
    if (names_.size() == kMostTopologyDevices) {
      fail(line.number, fmt::format("expected at most {} devices, found more", kMostTopologyDevices));
    }
    if (is_gpu(name) && !topology_.nics.empty()) {
      fail(line.number, fmt::format("expected the GPUs before the NICs, found {} behind {}", name, names_.back()));
    }
    names_.push_back(name);
    TopologyDevice device;
    device.name = name;
    (is_gpu(name) ? topology_.gpus : topology_.nics).push_back(device);
  }

  std::size_t read_title(const Line& line, const Tokens& tokens, std::size_t next) {
    const Tokens words = num_titles_ < kTitles.size() ? tokens_of(kTitles[num_titles_]) : Tokens{};
    for (const std::string_view word : words) {
      const std::string_view found = next < tokens.size() ? tokens[next] : std::string_view{};
      if (found != word) {
        fail(line.number, fmt::format("expected the column \"{}\", found {}", kTitles[num_titles_], found_text(found)));
      }
      ++next;
    }
    if (words.empty()) {
      fail(line.number, fmt::format("expected the end of the header, found {}", found_text(tokens[next])));
    }
    ++num_titles_;
    return next;
  }

  void read_rows() {
    for (std::size_t row = 0; row < names_.size(); ++row) {
      if (at_ == lines_.size()) {
        fail(last_line_, fmt::format("expected the row of {} ({} of {}), found the end of the file", names_[row],
                                     row + 1, names_.size()));
      }
      read_row(lines_[at_++], row);
    }
    if (at_ == lines_.size() || lines_[at_].text == "Legend:" || lines_[at_].text == "NIC Legend:") return;
    fail(lines_[at_].number, fmt::format("expected the end of the table or \"Legend:\" after {} rows, found {}",
                                         names_.size(), found_text(lines_[at_].text)));
  }

  void read_row(const Line& line, std::size_t row) {
    const Tokens tokens = tokens_of(line.text);
    check_row_name(line, tokens[0], row);
    if (tokens.size() < 1 + names_.size()) {
      fail(line.number, fmt::format("row {}: expected {} connections, one a device, found {}", names_[row],
                                    names_.size(), tokens.size() - 1));
    }
    for (std::size_t column = 0; column < names_.size(); ++column) {
      topology_.links[row * names_.size() + column] = read_word(line, tokens[1 + column], row, column);
    }
    row_lines_.push_back(line.number);
    const Tokens rest(tokens.begin() + static_cast<std::ptrdiff_t>(1 + names_.size()), tokens.end());
    if (row < topology_.gpus.size()) {
      read_affinity(line, rest, topology_.gpus[row]);
    } else if (!std::ranges::all_of(rest, [](std::string_view cell) { return cell == kUnknown; })) {
      fail(line.number, fmt::format("row {}: expected {} connections, found more: {}", names_[row], names_.size(),
                                    found_text(rest[0])));
    }
  }

  void check_row_name(const Line& line, std::string_view name, std::size_t row) const {
    if (name == names_[row]) return;
    const auto known = std::ranges::find(names_, name);
    const auto place = static_cast<std::size_t>(known - names_.begin());
    if (known != names_.end() && place < row) {
      fail(line.number, fmt::format("expected the row of {}, found {} again (first in line {})", names_[row], name,
                                    row_lines_[place]));
    }
    fail(line.number, fmt::format("expected the row of {}, found {}", names_[row], found_text(name)));
  }

  TopologyLink read_word(const Line& line, std::string_view token, std::size_t row, std::size_t column) const {
    const std::string where = fmt::format("row {}, column {}", names_[row], names_[column]);
    const TopologyLink link = parse_word(line, token, where);
    if ((link.kind == Connection::self) != (row == column)) {
      fail(line.number, fmt::format("{}: expected {}, found {}", where,
                                    row == column ? "X (self)" : "a connection to another device", token));
    }
    if (link.kind == Connection::nvlink && std::max(row, column) >= topology_.gpus.size()) {
      fail(line.number, fmt::format("{}: expected a PCIe connection of the NIC, found {}", where, token));
    }
    return link;
  }

  TopologyLink parse_word(const Line& line, std::string_view token, const std::string& where) const {
    for (const Word& word : kWords) {
      if (word.text == token) return {word.kind, 0};
    }
    if (token.size() > 2 && token.starts_with("NV") && std::ranges::all_of(token.substr(2), is_digit)) {
      int count = 0;
      const std::string_view digits = token.substr(2);
      const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), count);
      if (parsed.ec == std::errc{} && count >= 1 && count <= kMostNvlinks) return {Connection::nvlink, count};
      fail(line.number, fmt::format("{}: expected NV1 to NV{}, found {}", where, kMostNvlinks, found_text(token)));
    }
    const std::vector<std::string> known{"PIX", "PXB", "PHB", "NODE", "SYS", "NV1", "X"};
    fail(line.number, fmt::format("{}: expected X, PIX, PXB, PHB, NODE, SYS or NV#, found {}: {}", where,
                                  found_text(token), did_you_mean(token, known)));
  }

  void read_affinity(const Line& line, const Tokens& cells, TopologyDevice& gpu) {
    if (cells.size() > num_titles_) {
      fail(line.number, fmt::format("row {}: expected {} connections and {} columns behind them, found more: {}",
                                    gpu.name, names_.size(), num_titles_, found_text(cells[num_titles_])));
    }
    // Where the system has no NUMA nodes (WSL 2, some virtual machines) cells are blank or N/A.
    const bool unknown = std::ranges::all_of(cells, [](std::string_view cell) { return cell == kUnknown; });
    if (cells.size() < num_titles_ && unknown) return;
    if (cells.size() < num_titles_) {
      fail(line.number, fmt::format("row {}: expected \"{}\" in the last columns, found the end of the line", gpu.name,
                                    kTitles[cells.size()]));
    }
    const auto list = [&](std::size_t title) -> std::vector<int> {
      if (title >= num_titles_ || cells[title] == kUnknown) return {};
      if (const auto numbers = parse_number_list(cells[title])) return *numbers;
      fail(line.number, fmt::format("row {}: {}: expected a list such as 0-15,32-47 or N/A, found {}", gpu.name,
                                    kTitles[title], found_text(cells[title])));
    };
    if (!list(0).empty()) gpu.cpus = cells[0];
    gpu.numa = list(1);
    const std::vector<int> own = list(2);
    if (own.size() > 1) {
      fail(line.number,
           fmt::format("row {}: {}: expected one number or N/A, found {}", gpu.name, kTitles[2], found_text(cells[2])));
    }
    if (own.empty()) return;
    gpu.memory_node = own[0];
    topology_.superchip = true;
  }

  void read_legends() {
    if (at_ < lines_.size() && lines_[at_].text == "Legend:") ++at_;
    while (at_ < lines_.size() && lines_[at_].text != "NIC Legend:") {
      const Line& line = lines_[at_++];
      if (line.text.find('=') == std::string::npos) {
        fail(line.number,
             fmt::format("expected a line of the legend such as \"SYS = ...\", or \"NIC Legend:\", found {}",
                         found_text(line.text)));
      }
    }
    if (at_ == lines_.size()) return;
    ++at_;
    while (at_ < lines_.size()) read_nic_name(lines_[at_++]);
    for (const TopologyDevice& nic : topology_.nics) {
      if (!nic.device.empty()) continue;
      fail(last_line_, fmt::format("expected {} in the NIC legend, found the end of the file", nic.name));
    }
  }

  void read_nic_name(const Line& line) {
    const Tokens tokens = tokens_of(line.text);
    if (tokens.size() != 2 || !tokens[0].ends_with(':')) {
      fail(line.number,
           fmt::format("expected a NIC and its device such as \"NIC0: mlx5_0\", found {}", found_text(line.text)));
    }
    const std::string name(tokens[0].substr(0, tokens[0].size() - 1));
    const auto nic = std::ranges::find(topology_.nics, name, &TopologyDevice::name);
    if (nic == topology_.nics.end()) {
      std::vector<std::string> known;
      for (const TopologyDevice& other : topology_.nics) known.push_back(other.name);
      fail(line.number, fmt::format("expected a NIC of the table, found {}{}{}", found_text(name),
                                    known.empty() ? "" : ": ", did_you_mean(name, known)));
    }
    if (!nic->device.empty()) {
      fail(line.number, fmt::format("expected each NIC once in the legend, found {} again", name));
    }
    if (std::ranges::find(topology_.nics, tokens[1], &TopologyDevice::device) != topology_.nics.end()) {
      fail(line.number, fmt::format("expected one NIC a device, found {} again", found_text(tokens[1])));
    }
    nic->device = tokens[1];
  }

  void check_symmetry() const {
    for (std::size_t row = 0; row < names_.size(); ++row) {
      for (std::size_t column = 0; column < row; ++column) {
        const TopologyLink& expected = topology_.link(column, row);
        const TopologyLink& found = topology_.link(row, column);
        if (expected == found) continue;
        fail(row_lines_[row],
             fmt::format("row {}, column {}: expected {} as line {} says of the same two, found {}", names_[row],
                         names_[column], to_string(expected), row_lines_[column], to_string(found)));
      }
    }
  }

  /// NVLink hides how two GPUs meet on PCIe. A NIC that shares a tree of switches with one of them shows it: the other
  /// GPU meets the NIC where it meets the first. Without such a NIC, different NUMA nodes still say SYS.
  void infer_pcie() {
    const std::size_t count = topology_.gpus.size();
    topology_.pcie.resize(count * count);
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t j = 0; j < count; ++j) topology_.pcie[i * count + j] = pcie_between(i, j);
    }
    for (std::size_t i = 0; i < count; ++i) {  // what either side shows
      for (std::size_t j = 0; j < i; ++j) {
        auto& there = topology_.pcie[i * count + j];
        auto& back = topology_.pcie[j * count + i];
        if (!there || (back && *back < *there)) there = back;
        back = there;
      }
    }
  }

  std::optional<Connection> pcie_between(std::size_t i, std::size_t j) const {
    const Connection direct = topology_.link(i, j).kind;
    if (direct != Connection::nvlink) return direct;
    for (std::size_t nic = topology_.gpus.size(); nic < names_.size(); ++nic) {
      if (topology_.link(j, nic).kind <= Connection::pxb) return std::max(topology_.link(i, nic).kind, Connection::pxb);
    }
    const auto& a = topology_.gpus[i].numa;
    const auto& b = topology_.gpus[j].numa;
    if (!a.empty() && !b.empty() && a != b) return Connection::sys;
    return std::nullopt;
  }

  std::vector<Line> lines_;
  int last_line_;
  std::size_t at_ = 0;  // next line
  std::vector<std::string> names_;
  std::vector<int> row_lines_;
  std::size_t num_titles_ = 0;
  NodeTopology topology_;
};

}  // namespace

NodeTopology read_topology_matrix(std::string_view text, const std::string& file) {
  return MatrixReader(text, file).read();
}

}  // namespace zeroplan
