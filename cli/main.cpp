// The program: runs the command line, prints its outcome, maps exceptions to exit codes (spec section 3).

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>

#include "cli/commands.h"
#include "models/error.h"

namespace {

using namespace zeroplan;

/// 0, or the code of the write that failed.
int write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(descriptor, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) {  // a pipe that does not block, and is full
      pollfd ready{descriptor, POLLOUT, 0};
      ::poll(&ready, 1, -1);
      continue;
    }
    if (count < 0) return errno;
    text.remove_prefix(static_cast<std::size_t>(count));
  }
  return 0;
}

/// One line on stderr: what users typed may hold line breaks and escapes.
void say(std::string_view message) {
  std::string line = message.starts_with("zeroplan ") ? std::string(message) : fmt::format("zeroplan: {}", message);
  std::ranges::replace_if(
      line, [](unsigned char c) { return c < 0x20 || c == 0x7f; }, ' ');
  write_all(STDERR_FILENO, line + "\n");
}

int fail(int code, std::string_view message) {
  say(message);
  return code;
}

int bug(const char* what) {
  return fail(kBug, fmt::format("this is a bug in zeroplan {}: {}; please report this line and the command",
                                ZEROPLAN_VERSION, what));
}

/// A descriptor that is closed would be taken by the next file that is opened, and stdout's text would land in it.
void reserve_standard_descriptors() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(descriptor, F_GETFD) < 0) ::open("/dev/null", O_RDONLY);
  }
}

int print(const Outcome& outcome) {
  for (const std::string& note : outcome.notes) say(note);
  const int code = write_all(STDOUT_FILENO, outcome.out);
  // A reader that has seen enough (head) is no error.
  if (code != 0 && code != EPIPE) return fail(kBadInput, fmt::format("stdout: {}", std::strerror(code)));
  return outcome.exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // beyond `ulimit -f`: write() fails instead
  reserve_standard_descriptors();
  try {
    return print(run_command_line({argv + std::min(argc, 1), argv + argc}));
  } catch (const InputError& error) {
    return fail(kBadInput, error.what());
  } catch (const DeviceError& error) {
    return fail(kDeviceFailed, error.what());
  } catch (const std::exception& error) {
    return bug(error.what());
  } catch (...) {
    return bug("unknown exception");
  }
}
