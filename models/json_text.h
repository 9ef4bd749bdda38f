#pragma once

#include <string>
#include <string_view>

namespace zeroplan {

/// A string as JSON on one line, cut at a character after `longest` bytes; broken UTF-8 is replaced. For messages.
std::string json_quoted(std::string_view text, std::size_t longest);

}  // namespace zeroplan
