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

/// Owns a descriptor while a function may still throw.
class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor() {
    if (value_ >= 0) ::close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int value() const { return value_; }
  int release() { return std::exchange(value_, -1); }

 private:
  int value_;
};

}  // namespace

std::span<const std::byte> bytes_of_text(std::string_view text) { return std::as_bytes(std::span(text)); }

// --- AtomicFile --------------------------------------------------------------------------------------

AtomicFile::AtomicFile(fs::path path) : path_(std::move(path)), temporary_(path_) {
  temporary_ += ".tmp";
  // A new inode: a process that was killed and has not gone yet still writes to the old one. A link is not followed.
  if (::unlink(temporary_.c_str()) != 0 && errno != ENOENT) fail("unlink");
  descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor_ < 0) fail("open for writing");
}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::fail(std::string_view what) const { fail_device(temporary_, what, errno); }

void AtomicFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor_, bytes.data(), std::min(bytes.size(), kMaxTransfer));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write");
    size_ += written;
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void AtomicFile::commit() {
  if (::fsync(descriptor_) != 0) fail("fsync");
  const int closed = ::close(std::exchange(descriptor_, -1));
  if (closed != 0 || ::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const int code = errno;
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
  const Descriptor directory(::open(named.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.value() < 0) fail_device(named, "open", errno);
  // Some network file systems cannot sync a folder; they make it durable by themselves.
  if (::fsync(directory.value()) != 0 && errno != EINVAL) fail_device(named, "fsync", errno);
}

// --- InputFile ---------------------------------------------------------------------------------------

InputFile::InputFile(fs::path path) : path_(std::move(path)) {
  // O_NONBLOCK: a named pipe must not wait for a writer.
  Descriptor file(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.value() < 0) throw InputError(fmt::format("{}: cannot be read: {}", path_.string(), std::strerror(errno)));
  struct stat status {};
  if (::fstat(file.value(), &status) != 0) fail_device(path_, "fstat", errno);
  if (!S_ISREG(status.st_mode)) throw InputError(fmt::format("{}: expected a regular file", path_.string()));
  size_ = status.st_size;
  descriptor_ = file.release();
}

InputFile::~InputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)), size_(other.size_) {}

void InputFile::read(std::int64_t offset, std::span<std::byte> into) const {
  std::size_t done = 0;
  while (done < into.size()) {
    const ssize_t got = ::pread(descriptor_, into.data() + done, std::min(into.size() - done, kMaxTransfer),
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
