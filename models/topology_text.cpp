#include "models/topology_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <span>

#include "models/error.h"
#include "models/topology_parts.h"

namespace zeroplan {
namespace {

constexpr std::size_t kLongestFound = 40;
constexpr int kMostListed = 65536;  // CPUs and NUMA nodes of the largest kernels
constexpr std::string_view kBlanks = " \t\r\n";

std::optional<int> parse_number(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < 0 || value >= kMostListed)
    return std::nullopt;
  return value;
}

}  // namespace

std::string to_string(const TopologyLink& link) {
  switch (link.kind) {
    case Connection::self:
      return "X";
    case Connection::nvlink:
      return fmt::format("NV{}", link.nvlinks);
    case Connection::pix:
      return "PIX";
    case Connection::pxb:
      return "PXB";
    case Connection::phb:
      return "PHB";
    case Connection::node:
      return "NODE";
    case Connection::sys:
      return "SYS";
  }
  return "";
}

void fail_at(const std::string& file, int line, std::string_view message) {
  std::string printable(message);
  for (char& c : printable) {
    if (c < 0x20 || c == 0x7f) c = '?';  // names of XML elements may hold anything
  }
  throw InputError(fmt::format("{}:{}: {}", file, line, printable));
}

std::string found_text(std::string_view text) {
  if (text.empty()) return "nothing";
  std::string result = "\"";
  for (const char c : text.substr(0, kLongestFound)) result += c >= 0x20 && c < 0x7f ? c : '?';
  return result + (text.size() > kLongestFound ? "...\"" : "\"");
}

std::optional<std::vector<int>> parse_number_list(std::string_view text) {
  std::vector<int> numbers;
  while (true) {
    const std::size_t comma = text.find(',');
    const std::string_view range = text.substr(0, comma);
    const std::size_t dash = range.find('-');
    const auto first = parse_number(range.substr(0, dash));
    const auto last = dash == std::string_view::npos ? first : parse_number(range.substr(dash + 1));
    if (!first || !last || *last < *first) return std::nullopt;
    if (!numbers.empty() && *first <= numbers.back()) return std::nullopt;
    for (int number = *first; number <= *last; ++number) numbers.push_back(number);
    if (comma == std::string_view::npos) return numbers;
    text.remove_prefix(comma + 1);
  }
}

NodeTopology read_topology(std::string_view text, const std::string& file) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  const std::size_t nul = text.find('\0');
  if (nul != std::string_view::npos) {
    const auto line = 1 + std::ranges::count(text.substr(0, nul), '\n');
    fail_at(file, static_cast<int>(line), "expected text, found a NUL character");
  }
  const std::size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) {
    fail_at(file, 1, "expected the output of `nvidia-smi topo -m` or NCCL's topology XML, found an empty file");
  }
  return text[begin] == '<' ? read_topology_xml(text, file) : read_topology_matrix(text, file);
}

}  // namespace zeroplan
