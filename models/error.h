#pragma once
// The exceptions of the library boundary. An expected answer ("does not fit") is a value, never one of these.

#include <source_location>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace zeroplan {

/// Base of everything we throw on purpose. what() is one message for people, without a trailing newline.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The user's flag, file or path is wrong: exit code 2. The message says where, what was expected and what was found.
class InputError : public Error {
 public:
  using Error::Error;
};

/// A device or I/O failure during `run` or `probe`: exit code 3. Names the call and the code it returned.
class DeviceError : public Error {
 public:
  using Error::Error;
};

/// Levenshtein distance: insertions, deletions and replacements of one character.
std::size_t edit_distance(std::string_view a, std::string_view b);

/// The (at most `count`) candidates nearest to `text` by edit distance, case-insensitive, ignoring '-', '_' and
/// blanks; nearest first, ties in the order given. Candidates further than half of their length are left out
/// unless nothing is nearer.
std::vector<std::string> nearest_names(std::string_view text, std::span<const std::string> candidates,
                                       std::size_t count = 3);

/// "did you mean A, B or C?" or "" when there is no candidate.
std::string did_you_mean(std::string_view text, std::span<const std::string> candidates);

}  // namespace zeroplan
