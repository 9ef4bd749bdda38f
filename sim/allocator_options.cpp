// PYTORCH_CUDA_ALLOC_CONF.

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <string>

#include "models/error.h"
#include "models/units.h"
#include "sim/caching_allocator.h"
#include "sim/caching_allocator_parts.h"

namespace zeroplan {
namespace {

[[noreturn]] void refuse(std::string_view key, std::string_view expected, std::string_view found) {
  throw InputError(fmt::format("PYTORCH_CUDA_ALLOC_CONF: {}: expected {}, found \"{}\"", key, expected, found));
}

bool parse_switch(std::string_view key, std::string_view value) {
  if (value == "True") return true;
  if (value == "False") return false;
  refuse(key, "True or False", value);
}

std::int64_t parse_power_of_two(std::string_view key, std::string_view value) {
  const std::int64_t number = parse_integer(value, key, 0, 1 << 20);
  if (number > 1 && !std::has_single_bit(static_cast<std::uint64_t>(number))) refuse(key, "a power of two", value);
  return number;
}

/// "8" for every size, or "[256:1,512:2,>:8]": MiB from which a number of divisions holds, lower sizes as the first.
void parse_divisions(std::array<int, 16>& divisions, std::string_view value) {
  constexpr std::string_view kKey = "roundup_power2_divisions";
  if (value.empty() || value.front() != '[') {
    divisions.fill(static_cast<int>(parse_power_of_two(kKey, value)));
    return;
  }
  if (value.back() != ']') refuse(kKey, "a closing ]", value);
  value = value.substr(1, value.size() - 2);
  bool first = true;
  std::size_t last = 0;
  while (!value.empty()) {
    const std::size_t comma = std::min(value.find(','), value.size());
    const std::string_view item = value.substr(0, comma);
    const std::size_t colon = item.find(':');
    if (colon == std::string_view::npos) refuse(kKey, "size:divisions", item);
    const int count = static_cast<int>(parse_power_of_two(kKey, item.substr(colon + 1)));
    if (item.substr(0, colon) == ">") {
      std::fill(divisions.begin() + static_cast<std::ptrdiff_t>(last), divisions.end(), count);
    } else {
      const std::int64_t size = std::max<std::int64_t>(1, parse_power_of_two(kKey, item.substr(0, colon)));
      last = std::min<std::size_t>(15, static_cast<std::size_t>(std::countr_zero(static_cast<std::uint64_t>(size))));
      if (first) std::fill(divisions.begin(), divisions.begin() + static_cast<std::ptrdiff_t>(last), count);
      divisions[last] = count;
    }
    first = false;
    value = comma < value.size() ? value.substr(comma + 1) : std::string_view{};
  }
}

void parse_option(AllocatorOptions& options, std::string_view key, std::string_view value) {
  if (key == "expandable_segments") {
    options.expandable_segments = parse_switch(key, value);
  } else if (key == "max_split_size_mb") {
    options.max_split_size = parse_integer(value, key, 21, std::int64_t{1} << 30) * kMebibyte;
  } else if (key == "roundup_power2_divisions") {
    parse_divisions(options.roundup_power2_divisions, value);
  } else if (key == "garbage_collection_threshold") {
    const std::string text(value);
    char* end = nullptr;
    options.garbage_collection_threshold = std::strtod(text.c_str(), &end);
    const bool whole = !text.empty() && *end == '\0';
    if (!whole || !(options.garbage_collection_threshold > 0 && options.garbage_collection_threshold < 1)) {
      refuse(key, "a number between 0 and 1", value);
    }
  } else if (key == "backend" && value == "native") {
    return;
  } else if (key.starts_with("pinned_")) {
    return;  // how host memory is pinned, not how much
  } else {
    const std::vector<std::string> known = {"expandable_segments", "max_split_size_mb", "roundup_power2_divisions",
                                            "garbage_collection_threshold", "backend"};
    throw InputError(
        key == "backend"
            ? fmt::format("PYTORCH_CUDA_ALLOC_CONF: no rule for backend:{}, expected native", value)
            : fmt::format("PYTORCH_CUDA_ALLOC_CONF: no rule for {}:{} {}", key, value, did_you_mean(key, known)));
  }
}

}  // namespace

AllocatorOptions parse_allocator_options(std::string_view text) {
  AllocatorOptions options;
  while (!text.empty()) {
    std::size_t end = 0;
    for (int depth = 0; end < text.size() && (depth > 0 || text[end] != ','); ++end) {
      depth += text[end] == '[' ? 1 : text[end] == ']' ? -1 : 0;
    }
    const std::string_view item = text.substr(0, end);
    const std::size_t colon = item.find(':');
    if (colon == std::string_view::npos) refuse(item, "key:value", item);
    parse_option(options, item.substr(0, colon), item.substr(colon + 1));
    text = end < text.size() ? text.substr(end + 1) : std::string_view{};
  }
  return options;
}

}  // namespace zeroplan
