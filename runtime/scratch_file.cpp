#include "runtime/scratch_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "models/error.h"
#include "models/units.h"

namespace zeroplan {
namespace {

std::string amount(double bytes) { return fmt::format("{:.0f} bytes ({})", bytes, format_gib(Bytes(bytes))); }

// Of the file system, for users that are not root; nothing where it does not say.
std::optional<double> free_bytes(int descriptor) {
  struct statvfs disk {};
  if (fstatvfs(descriptor, &disk) != 0 || disk.f_blocks == 0) return std::nullopt;
  return static_cast<double>(disk.f_bavail) * static_cast<double>(disk.f_frsize);
}

[[noreturn]] void refuse_file(const std::string& directory, int code) {
  const std::string text = fmt::format("{}: the NVMe tier cannot make a file here: {}", directory, std::strerror(code));
  if (code == EACCES || code == EPERM || code == EROFS) throw InputError(text);
  throw DeviceError(text);
}

// What direct I/O asks of memory addresses, or nothing if it is not to be had.
struct DirectIo {
  int memory_alignment = 0, offset_alignment = 0;
};
std::optional<DirectIo> direct_io(int descriptor) {
#ifdef STATX_DIOALIGN
  struct statx facts {};
  if (statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &facts) == 0 && (facts.stx_mask & STATX_DIOALIGN) != 0) {
    if (facts.stx_dio_offset_align == 0) return std::nullopt;
    return DirectIo{static_cast<int>(facts.stx_dio_mem_align), static_cast<int>(facts.stx_dio_offset_align)};
  }
#endif
  // Linux before 6.1 does not say: a page serves all disks with blocks up to that size.
  static_cast<void>(descriptor);
  return DirectIo{4096, 4096};
}

}  // namespace

ScratchFile::ScratchFile(const ScratchFileOptions& options) : size_(options.size + 1) {
  try {
    create(options);
    allocate();
    if (options.direct) use_direct(options.largest_block);
  } catch (...) {
    if (named_ || options.keep) unlink(path_.c_str());
    throw;
  }
}

// The kernel may hold the file a little longer, for an io_uring that is being taken down.
ScratchFile::~ScratchFile() { flock(descriptor(), LOCK_UN); }

void ScratchFile::create(const ScratchFileOptions& options) {
  const std::string& directory = options.directory;
  struct stat facts {};
  if (stat(directory.c_str(), &facts) != 0)
    throw InputError(fmt::format("{}: expected a directory for the NVMe tier: {}", directory, std::strerror(errno)));
  if (!S_ISDIR(facts.st_mode))
    throw InputError(fmt::format("{}: expected a directory for the NVMe tier, found something else", directory));
  std::string path = fmt::format("{}/{}-XXXXXX", directory, options.stem);
  file_ = FileDescriptor(mkostemp(path.data(), O_CLOEXEC));
  if (!file_.is_open()) refuse_file(directory, errno);
  path_ = path;
  named_ = true;
  if (flock(descriptor(), LOCK_EX | LOCK_NB) != 0)
    notes_.push_back(fmt::format("{}: not locked against other processes: {}", path_, std::strerror(errno)));
  if (options.keep || unlink(path_.c_str()) == 0) named_ = false;
}

void ScratchFile::allocate() {
  const std::optional<double> free = free_bytes(descriptor());
  const auto refuse = [&](const std::string& reason) {
    throw DeviceError(fmt::format("{}: allocating {}: {}; {} free", path_, amount(static_cast<double>(size_)), reason,
                                  free ? amount(*free) : "an unknown amount is"));
  };
  // Beyond this limit the system sends a signal that ends the process.
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      static_cast<rlim_t>(size_) > limit.rlim_cur)
    refuse(fmt::format("the limit of a file (RLIMIT_FSIZE) is {} bytes", limit.rlim_cur));
  // A file system that finds out for itself has filled the disk by then, and others fail meanwhile.
  if (free && static_cast<double>(size_) > *free) refuse(std::strerror(ENOSPC));
  int code = 0;
  do {
    code = posix_fallocate(descriptor(), 0, size_);
  } while (code == EINTR);
  if (code != 0) refuse(std::strerror(code));
}

void ScratchFile::check_whole() const {
  struct stat facts {};
  if (fstat(descriptor(), &facts) != 0) throw DeviceError(fmt::format("{}: {}", path_, std::strerror(errno)));
  if (facts.st_size >= size_) return;
  throw DeviceError(fmt::format("{}: the file ends at byte {} of {}: somebody cut it", path_, facts.st_size, size_));
}

// After the allocation: where the file system has no call for it, glibc writes single bytes.
void ScratchFile::use_direct(int largest_block) {
  const auto give_up = [&](const std::string& reason) {
    notes_.push_back(fmt::format("{}: {}; transfers go through the page cache", path_, reason));
  };
  const int flags = fcntl(descriptor(), F_GETFL);
  if (flags < 0 || fcntl(descriptor(), F_SETFL, flags | O_DIRECT) != 0)
    return give_up(fmt::format("no direct I/O (O_DIRECT): {}", std::strerror(errno)));
  const std::optional<DirectIo> facts = direct_io(descriptor());
  if (!facts || facts->offset_alignment > largest_block) {
    fcntl(descriptor(), F_SETFL, flags);
    return give_up(facts ? fmt::format("the disk's blocks have {} bytes", facts->offset_alignment)
                         : "the file system has no direct I/O");
  }
  direct_ = true;
  memory_alignment_ = facts->memory_alignment;
}

}  // namespace zeroplan
