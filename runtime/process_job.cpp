#include "runtime/process_job.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <stdexcept>

#include "models/error.h"

namespace zeroplan {

using namespace std::chrono_literals;

namespace {

constexpr auto kVerdictLimit = 2000ms;  // beyond the time in which a dead store is found; the store answers at once
constexpr auto kGoodbyeLimit = 1000ms;

double seconds(std::chrono::milliseconds time) { return std::chrono::duration<double>(time).count(); }

FileDescriptor listen_for_ranks(const ProcessWorldOptions& options) {
  try {
    return listen_tcp(options.store_port, loopback_of(options.store_address));
  } catch (const DeviceError& error) {
    throw DeviceError(fmt::format("rank 0's store: {}", error.what()));
  }
}

void check(const ProcessWorldOptions& options) {
  if (options.size >= 1 && options.rank >= 0 && options.rank < options.size && options.silence_limit > 0ms) return;
  throw std::logic_error(fmt::format("make_process_world: rank {} of {}", options.rank, options.size));
}

}  // namespace

ProcessJob::ProcessJob(const ProcessWorldOptions& options, const std::function<PeerInfo()>& info) : options_(options) {
  check(options_);
  try {
    if (options_.rank == 0) {
      store_ = std::make_unique<ProcessStore>(listen_for_ranks(options_),
                                              StoreOptions{options_.size, options_.job_key, options_.wait_limit,
                                                           options_.connect_limit, options_.silence_limit});
    }
    connect(info);
    std::unique_lock lock(mutex_);
    // The store names who is missing; the time on top is for its answer to come.
    const auto limit = options_.connect_limit + options_.silence_limit;
    if (changed_.wait_for(lock, limit, [&] { return welcomed_ || failed(); }) && welcomed_) return;
    if (failed()) throw DeviceError(reason_);
    throw DeviceError(fmt::format("rank {}: what listens at {}:{} did not answer within {:.3g} s", rank(),
                                  options_.store_address, options_.store_port, seconds(limit)));
  } catch (...) {
    stop();
    throw;
  }
}

ProcessJob::~ProcessJob() { stop(); }

/// Says goodbye and ends the threads. The store closes the connection once it has read all.
void ProcessJob::stop() noexcept {
  if (thread_.joinable()) {
    {
      const std::lock_guard lock(mutex_);
      leaving_ = true;
      leave_by_ = Clock::now() + kGoodbyeLimit;
    }
    try {
      send(encode_frame(FrameType::goodbye));
    } catch (const std::exception&) {
      // The connection ends without a goodbye, which the store will see.
    }
    wake_.signal();
    thread_.join();
  }
  socket_.close();
  store_.reset();
}

void ProcessJob::connect(const std::function<PeerInfo()>& info) {
  const std::string loopback = loopback_of(options_.store_address);
  // Rank 0 may not reach itself by the name that others use.
  const std::string host = rank() > 0 ? options_.store_address : loopback.empty() ? "127.0.0.1" : loopback;
  const Clock::time_point deadline = Clock::now() + options_.connect_limit;
  Connected connected = connect_tcp(host, options_.store_port, deadline, -1);
  while (!connected.socket.is_open() && Clock::now() < deadline) {
    std::this_thread::sleep_for(50ms);  // rank 0 may start later
    connected = connect_tcp(host, options_.store_port, deadline, -1);
  }
  if (!connected.socket.is_open()) {
    throw DeviceError(fmt::format("rank {} did not reach rank 0's store at {}:{} within {:.3g} s: {}", rank(), host,
                                  options_.store_port, seconds(options_.connect_limit), connected.error));
  }
  socket_ = std::move(connected.socket);
  store_host_ = peer_host(socket_.value());
  Hello hello{options_.job_key, size(), rank(), info()};
  hello.info.address = own_host(socket_.value());
  heard_ = last_turn_ = last_beat_ = Clock::now();
  send(encode_frame(FrameType::hello, encode_hello(hello)));
  thread_ = std::thread([this] { listen(); });
}

void ProcessJob::listen() {
  const auto turn = std::clamp<std::chrono::milliseconds>(options_.silence_limit / 8, 10ms, 500ms);
  while (true) {
    try {
      std::array<pollfd, 2> fds{pollfd{-1, POLLIN, 0}, pollfd{wake_.value(), POLLIN, 0}};
      {
        const std::lock_guard lock(mutex_);
        if (leaving_ && (lost_ || Clock::now() >= leave_by_)) return;
        if (!lost_) fds[0].fd = socket_.value();
        if (!out_.empty()) fds[0].events = POLLIN | POLLOUT;
      }
      if (poll(fds.data(), fds.size(), static_cast<int>(turn.count())) < 0 && errno != EINTR) {
        throw DeviceError("poll failed: " + error_text(errno));
      }
      wake_.clear();
      if ((fds[0].revents & ~POLLOUT) != 0) read_store();
      keep_alive();
    } catch (const std::exception& error) {
      lose_store(fmt::format("failed: {}", error.what()));
    }
  }
}

void ProcessJob::read_store() {
  std::array<char, 16384> buffer;
  while (true) {
    const IoResult result = receive_some(socket_.value(), buffer.data(), buffer.size());
    if (result.state == IoResult::State::would_block) return;
    if (result.state == IoResult::State::closed) return lose_store("ended");
    {
      const std::lock_guard lock(mutex_);
      heard_ = Clock::now();
    }
    frames_.append({buffer.data(), result.bytes});
    while (const std::optional<Frame> frame = frames_.next()) handle(*frame);
    if (frames_.fault() == FrameReader::Fault::version) {
      return lose_store(
          fmt::format("speaks version {} of the protocol, this rank version {}", frames_.version(), kWireVersion));
    }
    if (frames_.fault() != FrameReader::Fault::none) return lose_store("does not speak our protocol");
  }
}

void ProcessJob::handle(const Frame& frame) {
  BodyReader reader(frame.body);
  switch (frame.type) {
    case FrameType::welcome:
      return take_welcome(frame.body);
    case FrameType::texts: {
      std::vector<std::string> texts;
      for (int i = 0; i < size(); ++i) texts.push_back(reader.text());
      if (!reader.complete()) return lose_store("sent texts that cannot be read");
      const std::lock_guard lock(mutex_);
      texts_ = std::move(texts);
      return changed_.notify_all();
    }
    case FrameType::failure:
      return fail(reader.text());
    case FrameType::beat:
      return;
    case FrameType::hello:
    case FrameType::exchange:
    case FrameType::goodbye:
    case FrameType::symptom:
      return lose_store("sent what only ranks send");
  }
}

void ProcessJob::take_welcome(const std::string& body) {
  BodyReader reader(body);
  const std::lock_guard lock(mutex_);
  token_ = reader.text();
  for (int i = 0; i < size(); ++i) {
    PeerInfo peer;
    peer.host = reader.text();
    peer.address = reader.text();
    peer.port = static_cast<int>(reader.number());
    // Who came over loopback is on the store's host.
    if (is_loopback(peer.address)) peer.address = store_host_;
    peers_.push_back(std::move(peer));
  }
  welcomed_ = reader.complete();
  changed_.notify_all();
}

/// Nothing more comes from the store; unless this rank is leaving, the job is over.
void ProcessJob::lose_store(const std::string& why) {
  bool leaving = false;
  {
    const std::lock_guard lock(mutex_);
    lost_ = true;
    leaving = leaving_;
  }
  if (!leaving) fail(fmt::format("rank 0, which serves the store at {}:{}, {}", store_host_, options_.store_port, why));
}

void ProcessJob::keep_alive() {
  const Clock::time_point now = Clock::now();
  std::chrono::duration<double> silent{};
  {
    const std::lock_guard lock(mutex_);
    // If this process itself did not run, the store's messages may be on their way.
    if (now - last_turn_ > options_.silence_limit / 2) heard_ = now;
    last_turn_ = now;
    if (lost_) return;
    silent = now - heard_;
    if (out_.empty() && now >= last_beat_ + options_.silence_limit / 5) {
      out_ = encode_frame(FrameType::beat);
      last_beat_ = now;
    }
    flush();
  }
  if (silent > options_.silence_limit) {
    lose_store(fmt::format("has been silent for {:.3g} s (stopped, or its network is down)", silent.count()));
  }
}

void ProcessJob::send(const std::string& bytes) {
  const std::lock_guard lock(mutex_);
  out_ += bytes;
  flush();
  if (!out_.empty()) wake_.signal();
}

/// Sends what goes at once. With the lock.
void ProcessJob::flush() {
  while (!lost_ && !out_.empty()) {
    iovec part{out_.data(), out_.size()};
    const IoResult result = send_some(socket_.value(), {&part, 1});
    // A closed connection is found by the thread that reads: what came before it may say why.
    if (result.state != IoResult::State::moved) return;
    out_.erase(0, result.bytes);
  }
}

std::vector<std::string> ProcessJob::exchange(CallKind kind, const std::string& text) {
  if (text.size() > kLongestText) throw std::logic_error(fmt::format("exchange: a text of {} bytes", text.size()));
  if (failed()) throw_failure();
  send(encode_frame(FrameType::exchange, BodyWriter().number(static_cast<int>(kind)).text(text).body()));
  std::unique_lock lock(mutex_);
  // The store names who is missing; the time on top is for its answer to come.
  const auto limit = options_.wait_limit + options_.silence_limit;
  const bool answered = changed_.wait_for(lock, limit, [&] { return texts_ || failed(); });
  if (answered && texts_) {
    std::vector<std::string> texts = std::move(*texts_);
    texts_.reset();
    return texts;
  }
  lock.unlock();
  if (answered) throw_failure();
  report_symptom(
      fmt::format("rank {} waited {:.3g} s for the store to answer in {}", rank(), seconds(limit), describe({kind})));
}

void ProcessJob::throw_failure() const {
  const std::lock_guard lock(mutex_);
  throw DeviceError(reason_);
}

void ProcessJob::fail(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (failed()) return;
    reason_ = reason;
    failed_.store(true, std::memory_order_release);
  }
  failure_event_.signal();
  changed_.notify_all();
}

void ProcessJob::abort(const std::string& reason) noexcept {
  if (failed()) return;  // for another reason, which was told
  try {
    const std::string text = fmt::format("rank {} aborted: {}", rank(), reason);
    send(encode_frame(FrameType::failure, BodyWriter().text(text).body()));
    fail(text);
  } catch (const std::exception&) {
    // No memory for the reason: the others end when this rank's connection does.
  }
}

void ProcessJob::report_as(FrameType type, const std::string& reason) {
  send(encode_frame(type, BodyWriter().text(reason).body()));
  wait_failed(options_.silence_limit + kVerdictLimit);
  fail(reason);
  throw_failure();
}

bool ProcessJob::wait_failed(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, limit, [&] { return failed(); });
}

}  // namespace zeroplan
