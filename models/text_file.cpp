#include "models/text_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string_view>

#include "models/error.h"
#include "models/json_reader.h"

namespace zeroplan {
namespace {

/// A file that is open for reading, with what messages call it.
class TextSource {
 public:
  // O_NONBLOCK: open() of a named pipe would wait for a writer.
  explicit TextSource(const std::string& path)
      : path_(path), descriptor_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY)) {
    if (descriptor_ < 0) fail_on_errno();
  }
  ~TextSource() { ::close(descriptor_); }
  TextSource(const TextSource&) = delete;
  TextSource& operator=(const TextSource&) = delete;

  /// Refuses what holds no text or has no end.
  void check_kind() {
    struct stat status {};
    if (::fstat(descriptor_, &status) != 0) fail_on_errno();
    waits_ = S_ISFIFO(status.st_mode) || (S_ISCHR(status.st_mode) && ::isatty(descriptor_) == 1);
    if (waits_ || S_ISREG(status.st_mode)) return;
    fail(S_ISDIR(status.st_mode) ? "expected a file, got a directory" : "expected a file or a pipe, got a device");
  }

  /// Reads into the block; 0 at the end of the text.
  std::size_t read(char* block, std::size_t size) {
    while (true) {
      const bool ready = !waits_ || wait();
      const ssize_t count = ::read(descriptor_, block, size);
      if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      if (count < 0) fail_on_errno();
      // Nothing ended: a pipe says so only once it has had a writer.
      if (count == 0 && !ready) {
        fail(fmt::format("expected a file, got a named pipe that nobody opened for writing in {} s",
                         kIdlePipeWait / 1000));
      }
      return static_cast<std::size_t>(count);
    }
  }

  [[noreturn]] void fail(std::string_view why) const { throw InputError(fmt::format("{}: {}", path_, why)); }

 private:
  /// Until there is something to read, or an end: false after kIdlePipeWait without either.
  bool wait() const {
    pollfd wanted{descriptor_, POLLIN, 0};
    return ::poll(&wanted, 1, kIdlePipeWait) != 0;
  }

  [[noreturn]] void fail_on_errno() const {
    fail(fmt::format("expected a file that can be read ({})", std::strerror(errno)));
  }

  const std::string& path_;
  int descriptor_;
  bool waits_ = false;
};

}  // namespace

std::string read_text_file(const std::string& path) {
  TextSource source(path);
  source.check_kind();
  std::string text;
  char block[1 << 16];
  while (const std::size_t count = source.read(block, sizeof block)) {
    text.append(block, count);
    if (text.size() > kMaxJsonBytes) source.fail(fmt::format("expected at most {} MiB", kMaxJsonBytes >> 20));
  }
  return text;
}

}  // namespace zeroplan
