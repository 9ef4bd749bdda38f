#pragma once
// A file descriptor with one owner.

#include <utility>

namespace zeroplan {

/// Owns a file descriptor; -1 is none.
class FileDescriptor {
 public:
  explicit FileDescriptor(int value = -1) : value_(value) {}
  ~FileDescriptor() { close(); }
  FileDescriptor(FileDescriptor&& other) noexcept : value_(std::exchange(other.value_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    if (this != &other) {
      close();
      value_ = std::exchange(other.value_, -1);
    }
    return *this;
  }

  int value() const { return value_; }
  bool is_open() const { return value_ >= 0; }
  /// 0, or the errno of close(), which may be the first to tell of a full disk. None is closed already.
  int close() noexcept;

 private:
  int value_;
};

}  // namespace zeroplan
