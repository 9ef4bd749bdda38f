#include "cli/terminal.h"

#include <unistd.h>

#include <cstdlib>
#include <string_view>

namespace zeroplan {
namespace {

std::string_view environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : value;
}

/// The variables in the order that setlocale(3) reads them.
bool is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const std::string_view value = environment(name);
    if (value.empty()) continue;
    return value.find("UTF-8") != std::string_view::npos || value.find("utf8") != std::string_view::npos;
  }
  return false;
}

}  // namespace

ReportStyle stdout_style() {
  if (::isatty(STDOUT_FILENO) == 0) return {};
  return {environment("NO_COLOR").empty() && environment("TERM") != "dumb", is_utf8()};
}

}  // namespace zeroplan
