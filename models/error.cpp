#include "models/error.h"

#include <algorithm>
#include <cctype>
#include <numeric>

namespace zeroplan {
namespace {

// Longer texts are no misspelt names; the cut bounds the quadratic distance.
constexpr std::size_t kLongestName = 128;

std::string folded(std::string_view text) {
  std::string result;
  for (const char c : text.substr(0, kLongestName)) {
    if (c == '-' || c == '_' || std::isspace(static_cast<unsigned char>(c))) continue;
    result += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return result;
}

}  // namespace

// One row at a time.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

std::vector<std::string> nearest_names(std::string_view text, std::span<const std::string> candidates,
                                       std::size_t count) {
  struct Scored {
    std::size_t distance;
    bool near;
    const std::string* name;
  };
  const std::string wanted = folded(text);
  std::vector<Scored> scored;
  for (const std::string& candidate : candidates) {
    const std::string name = folded(candidate);
    const std::size_t distance = edit_distance(wanted, name);
    scored.push_back({distance, 2 * distance <= name.size(), &candidate});
  }
  if (std::ranges::any_of(scored, &Scored::near)) {
    std::erase_if(scored, [](const Scored& s) { return !s.near; });
  }
  std::ranges::stable_sort(scored, {}, &Scored::distance);

  std::vector<std::string> names;
  for (const Scored& s : scored) {
    if (names.size() == count) break;
    names.push_back(*s.name);
  }
  return names;
}

std::string did_you_mean(std::string_view text, std::span<const std::string> candidates) {
  const std::vector<std::string> names = nearest_names(text, candidates);
  if (names.empty()) return "";
  std::string sentence = "did you mean " + names[0];
  for (std::size_t i = 1; i < names.size(); ++i) {
    sentence += (i + 1 == names.size() ? " or " : ", ") + names[i];
  }
  return sentence + "?";
}

}  // namespace zeroplan
