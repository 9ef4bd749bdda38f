#include "runtime/directory_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>

#include <cerrno>
#include <cstring>

#include "models/error.h"

namespace zeroplan {

DirectoryLock::DirectoryLock(const std::filesystem::path& directory)
    : directory_(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (!directory_.is_open()) {
    throw InputError(fmt::format("{}: expected a directory: {}", directory.string(), std::strerror(errno)));
  }
  while (::flock(directory_.value(), LOCK_EX | LOCK_NB) != 0) {
    const int code = errno;
    if (code == EINTR) continue;
    if (code == ENOLCK || code == EOPNOTSUPP || code == ENOSYS) return;
    if (code == EWOULDBLOCK) {
      throw InputError(fmt::format("{}: another run writes its checkpoints here; choose another directory or wait",
                                   directory.string()));
    }
    throw DeviceError(fmt::format("{}: flock: {}", directory.string(), std::strerror(code)));
  }
}

}  // namespace zeroplan
