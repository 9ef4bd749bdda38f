#include "runtime/file_descriptor.h"

#include <unistd.h>

#include <cerrno>

namespace zeroplan {

int FileDescriptor::close() noexcept {
  if (!is_open()) return 0;
  return ::close(std::exchange(value_, -1)) == 0 ? 0 : errno;
}

}  // namespace zeroplan
