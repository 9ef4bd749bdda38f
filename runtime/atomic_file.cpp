#include "runtime/atomic_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fmt/format.h>

#include "models/error.h"

namespace zeroplan {
namespace {

namespace fs = std::filesystem;

/// One call moves at most this much, so that a signal or a kill never waits long, and 2 GiB limits never matter.
constexpr std::size_t kMaxTransfer = std::size_t{64} << 20;

[[noreturn]] void fail_device(const fs::path& path, std::string_view call, int code) {
  throw DeviceError(fmt::format("{}: {}: {}", path.string(), call, std::strerror(code)));
}

}  // namespace

std::span<const std::byte> bytes_of_text(std::string_view text) { return std::as_bytes(std::span(text)); }

// --- AtomicFile --------------------------------------------------------------------------------------

AtomicFile::AtomicFile(fs::path path) : path_(std::move(path)), temporary_(path_) {
  temporary_ += ".tmp";
  // A new inode: a process that was killed and has not gone yet still writes to the old one. A link is not followed.
  if (::unlink(temporary_.c_str()) != 0 && errno != ENOENT) fail("unlink");
  file_ = FileDescriptor(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!file_.is_open()) fail("open for writing");
}

AtomicFile::~AtomicFile() {
  if (!file_.is_open()) return;
  file_.close();
  ::unlink(temporary_.c_str());
}

void AtomicFile::fail(std::string_view what) const { fail_device(temporary_, what, errno); }

void AtomicFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(file_.value(), bytes.data(), std::min(bytes.size(), kMaxTransfer));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write");
    size_ += written;
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void AtomicFile::commit() {
  if (::fsync(file_.value()) != 0) fail("fsync");
  const int closed = file_.close();
  if (closed != 0 || ::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const int code = closed != 0 ? closed : errno;
    ::unlink(temporary_.c_str());
    fail_device(path_, closed != 0 ? "close" : "rename", code);
  }
  sync_directory(path_.parent_path());
}

void write_file_atomically(const fs::path& path, std::string_view text) {
  AtomicFile file(path);
  file.write(bytes_of_text(text));
  file.commit();
}

// --- directories -------------------------------------------------------------------------------------

void make_directories(const fs::path& path) {
  if (path.empty()) return;
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0) {
    if (!S_ISDIR(status.st_mode)) throw InputError(fmt::format("{}: expected a directory, got a file", path.string()));
    return;
  }
  if (errno == ENOTDIR) throw InputError(fmt::format("{}: a part of the path is not a directory", path.string()));
  if (errno != ENOENT) fail_device(path, "stat", errno);
  const fs::path parent = path.has_filename() ? path.parent_path() : path.parent_path().parent_path();
  make_directories(parent);
  // Another rank may have been faster.
  if (::mkdir(path.c_str(), 0777) != 0 && errno != EEXIST) fail_device(path, "mkdir", errno);
  sync_directory(parent);
}

void sync_directory(const fs::path& path) {
  const fs::path named = path.empty() ? fs::path(".") : path;
  const FileDescriptor directory(::open(named.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory.is_open()) fail_device(named, "open", errno);
  // Some network file systems cannot sync a folder; they make it durable by themselves.
  if (::fsync(directory.value()) != 0 && errno != EINVAL) fail_device(named, "fsync", errno);
}

// --- InputFile ---------------------------------------------------------------------------------------

InputFile::InputFile(fs::path path) : path_(std::move(path)) {
  // O_NONBLOCK: a named pipe must not wait for a writer.
  file_ = FileDescriptor(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file_.is_open()) throw InputError(fmt::format("{}: cannot be read: {}", path_.string(), std::strerror(errno)));
  struct stat status {};
  if (::fstat(file_.value(), &status) != 0) fail_device(path_, "fstat", errno);
  if (!S_ISREG(status.st_mode)) throw InputError(fmt::format("{}: expected a regular file", path_.string()));
  size_ = status.st_size;
}

void InputFile::read(std::int64_t offset, std::span<std::byte> into) const {
  std::size_t done = 0;
  while (done < into.size()) {
    const ssize_t got = ::pread(file_.value(), into.data() + done, std::min(into.size() - done, kMaxTransfer),
                                offset + static_cast<std::int64_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_device(path_, fmt::format("read at {}", offset + static_cast<std::int64_t>(done)), errno);
    if (got == 0) {
      throw InputError(fmt::format("{}: truncated: expected {} bytes at offset {}, found {}", path_.string(),
                                   into.size(), offset, done));
    }
    done += static_cast<std::size_t>(got);
  }
}

}  // namespace zeroplan
