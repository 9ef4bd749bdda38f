#include "runtime/shared_region.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "models/error.h"

namespace zeroplan {
namespace {

std::byte* map(int descriptor, std::int64_t bytes, int protection) {
  void* data = mmap(nullptr, static_cast<std::size_t>(bytes), protection, MAP_SHARED, descriptor, 0);
  if (data == MAP_FAILED) throw DeviceError(fmt::format("mmap of {} shared bytes: {}", bytes, error_text(errno)));
  return static_cast<std::byte*>(data);
}

/// Room for one descriptor beside a message.
union DescriptorMessage {
  cmsghdr header;
  char bytes[CMSG_SPACE(sizeof(int))];
};

msghdr message_with(iovec& part, DescriptorMessage& control) {
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof(control.bytes);
  return message;
}

}  // namespace

SharedRegion SharedRegion::create(std::int64_t bytes) {
  FileDescriptor descriptor(memfd_create("zeroplan", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!descriptor.is_open()) throw DeviceError("memfd_create failed: " + error_text(errno));
  // Reserved now: a page that cannot be had later would be a SIGBUS.
  const int error = posix_fallocate(descriptor.value(), 0, bytes);
  if (error != 0) throw DeviceError(fmt::format("no memory for {} shared bytes: {}", bytes, error_text(error)));
  if (fcntl(descriptor.value(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    throw DeviceError("cannot seal shared memory: " + error_text(errno));
  }
  std::byte* data = map(descriptor.value(), bytes, PROT_READ | PROT_WRITE);
  return SharedRegion(std::move(descriptor), data, bytes);
}

SharedRegion SharedRegion::attach(const FileDescriptor& descriptor, std::int64_t bytes) {
  struct stat status {};
  const int seals = fcntl(descriptor.value(), F_GET_SEALS);
  if (fstat(descriptor.value(), &status) != 0 || status.st_size != bytes || seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    throw DeviceError("a peer's shared memory has another size or no seal");
  }
  return SharedRegion(FileDescriptor(), map(descriptor.value(), bytes, PROT_READ), bytes);
}

SharedRegion::~SharedRegion() {
  if (data_ != nullptr) munmap(data_, static_cast<std::size_t>(bytes_));
}

SharedRegion::SharedRegion(SharedRegion&& other) noexcept
    : descriptor_(std::move(other.descriptor_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

SharedRegion& SharedRegion::operator=(SharedRegion&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void send_descriptor(int socket, int descriptor) {
  char mark = 'm';
  iovec part{&mark, 1};
  DescriptorMessage control{};
  msghdr message = message_with(part, control);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  ssize_t sent = -1;
  do {
    sent = sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  // A peer that is gone is found when its answer is read.
  if (sent != 1 && errno != EPIPE && errno != ECONNRESET) {
    throw DeviceError("cannot send shared memory to a peer: " + error_text(errno));
  }
}

FileDescriptor receive_descriptor(int socket, int stop, Deadline deadline) {
  while (wait_for(socket, POLLIN, stop, deadline)) {
    char mark = 0;
    iovec part{&mark, 1};
    DescriptorMessage control{};
    msghdr message = message_with(part, control);
    const ssize_t received = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (received < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    const cmsghdr* header = received == 1 ? CMSG_FIRSTHDR(&message) : nullptr;
    if (header == nullptr || header->cmsg_type != SCM_RIGHTS || header->cmsg_len != CMSG_LEN(sizeof(int))) break;
    int descriptor = -1;
    std::memcpy(&descriptor, CMSG_DATA(header), sizeof(int));
    return FileDescriptor(descriptor);
  }
  return FileDescriptor();
}

}  // namespace zeroplan
