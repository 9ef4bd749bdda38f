#include "runtime/sockets.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>

#include "models/error.h"

namespace zeroplan {
namespace {

constexpr int kBacklog = 1024;

template <class Call>
auto retried(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

IoResult io_result(ssize_t moved) {
  if (moved >= 0) return {IoResult::State::moved, static_cast<std::size_t>(moved), 0};
  if (errno == EAGAIN || errno == EWOULDBLOCK) return {IoResult::State::would_block, 0, 0};
  return {IoResult::State::closed, 0, errno};
}

void set_option(int socket, int level, int option, int value) {
  // Options that only tune: a kernel without one works as well.
  (void)setsockopt(socket, level, option, &value, sizeof(value));
}

sockaddr_storage name_of(int socket, bool peer) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  const int result = peer ? getpeername(socket, generic, &length) : getsockname(socket, generic, &length);
  if (result != 0) address.ss_family = AF_UNSPEC;
  return address;
}

std::string host_text(const sockaddr_storage& address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (address.ss_family == AF_INET) {
    const auto& ip4 = reinterpret_cast<const sockaddr_in&>(address);
    inet_ntop(AF_INET, &ip4.sin_addr, text.data(), text.size());
  } else if (address.ss_family == AF_INET6) {
    const auto& ip6 = reinterpret_cast<const sockaddr_in6&>(address);
    if (IN6_IS_ADDR_V4MAPPED(&ip6.sin6_addr)) {
      inet_ntop(AF_INET, &ip6.sin6_addr.s6_addr[12], text.data(), text.size());
    } else {
      inet_ntop(AF_INET6, &ip6.sin6_addr, text.data(), text.size());
    }
  }
  return text.data();
}

struct AddressList {
  std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> first{nullptr, &freeaddrinfo};
  std::string error;
};

AddressList resolve(const std::string& host, int port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  AddressList list;
  const int error = getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) {
    list.error = error == EAI_SYSTEM ? error_text(errno) : gai_strerror(error);
  } else {
    list.first.reset(found);
  }
  return list;
}

sockaddr_un local_address(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::size_t size = std::min(name.size(), sizeof(address.sun_path) - 1);
  std::memcpy(address.sun_path + 1, name.data(), size);  // a leading 0: no file
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size);
  return address;
}

}  // namespace

std::string error_text(int error) { return error == 0 ? "end of file" : std::generic_category().message(error); }

int poll_time(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  return static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 1'000'000));
}

bool wait_for(int socket, short events, int stop, Deadline deadline) {
  while (true) {
    std::array<pollfd, 2> fds{pollfd{socket, events, 0}, pollfd{stop, POLLIN, 0}};
    const int ready = poll(fds.data(), fds.size(), poll_time(deadline));
    if (ready < 0 && errno != EINTR) throw DeviceError("poll failed: " + error_text(errno));
    if (ready > 0) return fds[1].revents == 0;
    if (ready == 0 && std::chrono::steady_clock::now() >= deadline) return false;
  }
}

StickyEvent::StickyEvent() : event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_.is_open()) throw DeviceError("eventfd failed: " + error_text(errno));
}

void StickyEvent::signal() noexcept {
  const std::uint64_t one = 1;
  (void)retried([&] { return write(event_.value(), &one, sizeof(one)); });
}

void StickyEvent::clear() noexcept {
  std::uint64_t count = 0;
  (void)retried([&] { return read(event_.value(), &count, sizeof(count)); });
}

IoResult receive_some(int socket, void* data, std::size_t bytes) {
  const IoResult result = io_result(retried([&] { return recv(socket, data, bytes, MSG_DONTWAIT); }));
  if (result.state == IoResult::State::moved && result.bytes == 0) return {IoResult::State::closed, 0, 0};
  return result;
}

IoResult send_some(int socket, std::span<iovec> parts) {
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  return io_result(retried([&] { return sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL); }));
}

FileDescriptor listen_tcp(int port, const std::string& loopback) {
  int error = 0;
  for (const std::string& host : {loopback.empty() ? std::string("::") : loopback, std::string("0.0.0.0")}) {
    const AddressList list = resolve(host, port, AI_PASSIVE | AI_NUMERICHOST | AI_NUMERICSERV);
    if (!list.first) throw DeviceError(fmt::format("no address to listen on: {}: {}", host, list.error));
    const addrinfo& address = *list.first;
    FileDescriptor socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (socket.is_open()) {
      set_option(socket.value(), SOL_SOCKET, SO_REUSEADDR, 1);
      if (address.ai_family == AF_INET6) set_option(socket.value(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
      if (bind(socket.value(), address.ai_addr, address.ai_addrlen) == 0 && listen(socket.value(), kBacklog) == 0) {
        return socket;
      }
    }
    error = errno;
    // A host without IPv6 listens on IPv4; any other error would be the same there.
    if (!loopback.empty() || (error != EAFNOSUPPORT && error != EADDRNOTAVAIL)) break;
  }
  throw DeviceError(fmt::format("cannot listen on port {}: {}", port, error_text(error)));
}

FileDescriptor listen_local(const std::string& name) {
  socklen_t length = 0;
  const sockaddr_un address = local_address(name, length);
  FileDescriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.is_open() || bind(socket.value(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      listen(socket.value(), kBacklog) != 0) {
    throw DeviceError(fmt::format("cannot listen on the local socket {}: {}", name, error_text(errno)));
  }
  return socket;
}

int port_of(int socket) {
  const sockaddr_storage address = name_of(socket, false);
  if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
  return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

std::string own_host(int socket) { return host_text(name_of(socket, false)); }
std::string peer_host(int socket) { return host_text(name_of(socket, true)); }
bool is_loopback(const std::string& numeric_host) { return numeric_host == "::1" || numeric_host.starts_with("127."); }

std::string loopback_of(const std::string& host) {
  if (host == "localhost") return "127.0.0.1";
  return is_loopback(host) ? host : "";
}

FileDescriptor accept_one(int listener) {
  FileDescriptor socket(retried([&] { return accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK); }));
  const int error = errno;
  // The connection stays in the queue then, and poll() would report it for ever.
  if (!socket.is_open() && (error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM)) {
    throw DeviceError("cannot accept a connection: " + error_text(error));
  }
  if (socket.is_open()) set_option(socket.value(), IPPROTO_TCP, TCP_NODELAY, 1);
  return socket;
}

Connected connect_tcp(const std::string& host, int port, Deadline deadline, int stop) {
  Connected result;
  const AddressList list = resolve(host, port, AI_NUMERICSERV);
  result.error = list.error;
  for (const addrinfo* address = list.first.get(); address != nullptr; address = address->ai_next) {
    FileDescriptor socket(::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    int error = errno;
    if (socket.is_open()) {
      error = connect(socket.value(), address->ai_addr, address->ai_addrlen) == 0 ? 0 : errno;
      // An interrupted connect goes on, as one that did not finish at once.
      if (error == EINPROGRESS || error == EINTR) {
        socklen_t length = sizeof(error);
        error = ETIMEDOUT;
        if (wait_for(socket.value(), POLLOUT, stop, deadline)) {
          getsockopt(socket.value(), SOL_SOCKET, SO_ERROR, &error, &length);
        }
      }
    }
    // A port of this host that nobody listens on may be given to the socket itself, which then meets itself.
    if (error == 0 && port_of(socket.value()) == port && own_host(socket.value()) == peer_host(socket.value())) {
      error = ECONNREFUSED;
    }
    if (error == 0) {
      set_option(socket.value(), IPPROTO_TCP, TCP_NODELAY, 1);
      return {std::move(socket), {}};
    }
    result.error = error_text(error);
  }
  return result;
}

Connected connect_local(const std::string& name) {
  socklen_t length = 0;
  const sockaddr_un address = local_address(name, length);
  FileDescriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket.is_open() &&
      retried([&] { return connect(socket.value(), reinterpret_cast<const sockaddr*>(&address), length); }) == 0) {
    return {std::move(socket), {}};
  }
  return {FileDescriptor(), error_text(errno)};
}

}  // namespace zeroplan
