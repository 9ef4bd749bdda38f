// What a name that nobody knows was meant to be: a slip of the hand, words cut short, words left out.

#include <algorithm>

#include "models/error.h"
#include "planner/lint_parts.h"

namespace zeroplan {
namespace {

constexpr std::size_t kLongestName = 96;  // longer texts are no misspelt names; bounds the quadratic distance

std::string folded(std::string_view text) {
  std::string result;
  for (const char c : text.substr(0, kLongestName + 1)) {
    if (c == ' ') continue;
    result += c == '-' ? '_' : c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  }
  return result;
}

bool is_letter(char c) { return c >= 'a' && c <= 'z'; }

/// "trainBatchSize" -> "train_Batch_Size": the words of a name that capitals part.
std::string parted(std::string_view name) {
  std::string result;
  for (const char c : name) {
    if (c >= 'A' && c <= 'Z' && !result.empty() && is_letter(result.back())) result += '_';
    result += c;
  }
  return result;
}

/// "train_bs" -> train, batch, size: the one usual abbreviation of two words.
std::vector<std::string> words_of(std::string_view name) {
  std::vector<std::string> words;
  for (std::string rest = folded(parted(name)); !rest.empty();) {
    const std::size_t end = std::min(rest.find('_'), rest.size());
    const std::string word = rest.substr(0, end);
    rest.erase(0, std::min(end + 1, rest.size()));
    if (word == "bs") {
      words.insert(words.end(), {"batch", "size"});
    } else if (!word.empty()) {
      words.push_back(word);
    }
  }
  return words;
}

std::string_view singular(std::string_view word) {
  if (word.size() > 3 && word.ends_with('s') && !word.ends_with("ss")) word.remove_suffix(1);
  return word;
}

/// The letters of `part` stand in `whole` in this order.
bool letters_within(std::string_view part, std::string_view whole) {
  std::size_t at = 0;
  for (const char c : part) {
    at = whole.find(c, at);
    if (at == std::string_view::npos) return false;
    ++at;
  }
  return true;
}

/// `b` cut short: accum and accumulation, ckpt and checkpointing. Digits say something of their own: stage is not
/// stage3.
bool shortens(std::string_view a, std::string_view b) {
  constexpr std::size_t kShortest = 3;
  if (a.size() < kShortest || !std::ranges::all_of(a, is_letter) || !std::ranges::all_of(b, is_letter)) return false;
  if (b.starts_with(a)) return true;
  return a.front() == b.front() && (a.size() > kShortest || a.back() == b.back()) && letters_within(a, b);
}

/// Equal, or one is the other cut short, with an s behind it or not: params and parameter, wts and weights.
bool same_word(std::string_view a, std::string_view b) {
  if (a.size() > b.size()) std::swap(a, b);
  return singular(a) == singular(b) || shortens(a, b) || shortens(singular(a), singular(b));
}

/// How many words of `name` are left out in `text`, whose words all stand in it in this order. Nothing when that is not
/// so, or when what is there is less than two words and half of the name.
std::optional<std::size_t> words_left_out(const std::vector<std::string>& text, const std::vector<std::string>& name) {
  std::size_t matched = 0;
  for (const std::string& word : name) {
    if (matched < text.size() && same_word(text[matched], word)) ++matched;
  }
  const std::size_t missing = name.size() - matched;
  const bool enough = missing == 0 || (matched >= 2 && matched >= missing);
  return matched == text.size() && enough ? std::optional(missing) : std::nullopt;
}

}  // namespace

bool same_but_case(std::string_view a, std::string_view b) {
  return a != b && a.size() <= kLongestName && folded(a) == folded(b);
}

std::string slip_of(std::string_view text, const std::vector<std::string>& names) {
  constexpr std::size_t kMostSlips = 3;
  if (text.size() > kLongestName) return "";
  const std::string wanted = folded(text);
  const std::size_t allowed = std::min(kMostSlips, std::max<std::size_t>(1, wanted.size() / 5));
  std::string best;
  std::size_t best_distance = allowed + 1;
  for (const std::string& name : names) {
    const std::string other = folded(name);
    const std::size_t longer = std::max(other.size(), wanted.size()), shorter = std::min(other.size(), wanted.size());
    if (longer - shorter > allowed || shorter < 3) continue;
    const std::size_t found = edit_distance(wanted, other);
    if (found < best_distance) best = name, best_distance = found;
  }
  return best;
}

std::vector<std::string> meant_names(std::string_view text, const std::vector<std::string>& names) {
  if (text.size() > kLongestName) return {};
  const std::vector<std::string> words = words_of(text);
  std::vector<std::string> shortened;
  std::size_t fewest = kLongestName;
  for (const std::string& name : names) {
    const auto missing = words_left_out(words, words_of(name));
    if (!missing || *missing > fewest) continue;
    if (*missing < fewest) shortened.clear();
    fewest = *missing;
    shortened.push_back(name);
  }
  // A slip is nearer than a word left out, and a name in full but for its abbreviations nearer than a slip.
  if (fewest > 0) {
    if (std::string slip = slip_of(text, names); !slip.empty()) return {std::move(slip)};
  }
  return shortened;
}

std::string meant_name(std::string_view text, const std::vector<std::string>& names) {
  std::vector<std::string> meant = meant_names(text, names);
  return meant.size() == 1 ? std::move(meant.front()) : "";
}

}  // namespace zeroplan
