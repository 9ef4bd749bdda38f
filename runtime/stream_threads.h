#pragma once
// One thread for each stream that a schedule uses. A step: every thread goes through its stream's ops in id order and
// waits, before each, until the ops it comes after are done.

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "models/measured.h"
#include "models/schedule.h"
#include "runtime/op_binding.h"

namespace zeroplan {

class StreamThreads {
 public:
  /// `schedule` is flat and outlives this, as `actions` does. `on_error` is called once with what the first failing op
  /// threw, from its thread: it must end calls that wait for other ranks, and may not throw. Throws DeviceError when
  /// the system has no more threads.
  StreamThreads(const Schedule& schedule, const std::vector<Action>& actions,
                std::function<void(const std::string&)> on_error);
  ~StreamThreads();
  StreamThreads(const StreamThreads&) = delete;
  StreamThreads& operator=(const StreamThreads&) = delete;

  /// Runs all ops once. Throws what the first failing op threw; every later call throws the same.
  void run();
  const StepTimes& times() const { return times_; }
  double seconds() const { return seconds_; }

 private:
  void start();
  void stop() noexcept;
  void work(Stream stream);
  void run_stream(Stream stream, std::int64_t base);
  bool wait_for(Stream stream, std::int64_t progress);
  void fail(std::exception_ptr error) noexcept;
  Seconds since_start(TimePoint t) const;

  const Schedule& schedule_;
  const std::vector<Action>& actions_;
  std::function<void(const std::string&)> on_error_;
  std::array<std::vector<std::uint32_t>, kNumStreams> ops_;  // of each stream
  /// Ops of the stream up to this one are done: step x number of ops + id + 1. Grows only.
  std::array<std::atomic<std::int64_t>, kNumStreams> progress_{};
  std::atomic<bool> failed_ = false;
  StepTimes times_;
  TimePoint start_;
  double seconds_ = 0;

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::int64_t steps_ = 0;  // begun
  int running_ = 0;         // threads still in this step
  bool stop_ = false;
  std::exception_ptr error_;
  std::vector<std::jthread> threads_;
};

}  // namespace zeroplan
