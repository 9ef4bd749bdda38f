#pragma once
// Text that the user names: a file, or what a pipe brings.

#include <string>

namespace zeroplan {

/// In milliseconds: as long a named pipe may have no writer. With one, as in a pipe of the shell, text may come at any
/// time.
inline constexpr int kIdlePipeWait = 10'000;

/// The whole text of a regular file, a pipe (`/dev/stdin`, `<(command)`, a named one) or a terminal, of at most
/// kMaxJsonBytes (models/json_reader.h). Throws InputError, which begins with the path: missing, unreadable or larger;
/// a directory; another device (/dev/zero has no end); a named pipe that nobody opens for writing.
std::string read_text_file(const std::string& path);

}  // namespace zeroplan
