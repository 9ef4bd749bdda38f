#include "runtime/stream_threads.h"

#include <limits>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "models/error.h"

namespace zeroplan {
namespace {

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

}  // namespace

StreamThreads::StreamThreads(const Schedule& schedule, const std::vector<Action>& actions,
                             std::function<void(const std::string&)> on_error)
    : schedule_(schedule), actions_(actions), on_error_(std::move(on_error)) {
  if (schedule.folded()) throw std::logic_error("executor: needs a flat schedule");
  const auto ops = schedule.ops();
  for (std::uint32_t i = 0; i < ops.size(); ++i) ops_[static_cast<std::size_t>(ops[i].stream)].push_back(i);
  times_.trace.ops.resize(ops.size());
  times_.transfer_starts.resize(ops.size());
  try {
    start();
  } catch (const std::system_error& e) {
    stop();  // or the threads that did start would wait for ever
    throw DeviceError(std::string("no more threads: ") + e.what());
  }
}

StreamThreads::~StreamThreads() { stop(); }

void StreamThreads::start() {
  for (int s = 0; s < kNumStreams; ++s) {
    if (!ops_[static_cast<std::size_t>(s)].empty()) {
      threads_.emplace_back([this, s] { work(static_cast<Stream>(s)); });
    }
  }
}

void StreamThreads::stop() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
}

void StreamThreads::run() {
  std::unique_lock lock(mutex_);
  if (error_) std::rethrow_exception(error_);
  start_ = std::chrono::steady_clock::now();
  running_ = static_cast<int>(threads_.size());
  ++steps_;
  wake_.notify_all();
  done_.wait(lock, [&] { return running_ == 0; });
  seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  if (error_) std::rethrow_exception(error_);
}

void StreamThreads::work(Stream stream) {
  std::int64_t seen = 0;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stop_ || steps_ > seen; });
      if (stop_) return;
      seen = steps_;
    }
    run_stream(stream, (seen - 1) * static_cast<std::int64_t>(schedule_.ops().size()));
    const std::lock_guard lock(mutex_);
    if (--running_ == 0) done_.notify_all();
  }
}

void StreamThreads::run_stream(Stream stream, std::int64_t base) {
  auto& progress = progress_[static_cast<std::size_t>(stream)];
  for (const std::uint32_t i : ops_[static_cast<std::size_t>(stream)]) {
    const Op& op = schedule_.ops()[i];
    for (const OpRef edge : schedule_.after(op)) {
      const Stream other = schedule_.ops()[edge.index()].stream;
      if (other != stream && !wait_for(other, base + edge.index() + 1)) return;
    }
    if (failed_.load(std::memory_order_acquire)) return;
    const TimePoint begin = std::chrono::steady_clock::now();
    std::optional<TimePoint> transfer;
    try {
      transfer = actions_[i]();
    } catch (...) {
      return fail(std::current_exception());
    }
    times_.trace.ops[i] = {since_start(begin), since_start(std::chrono::steady_clock::now())};
    times_.transfer_starts[i] = since_start(transfer.value_or(begin));
    progress.store(base + i + 1);  // sequentially consistent: it may not undo what fail() has stored
    if (failed_.load()) progress.store(std::numeric_limits<std::int64_t>::max());
    progress.notify_all();
  }
}

// False when the step has failed.
bool StreamThreads::wait_for(Stream stream, std::int64_t needed) {
  const auto& progress = progress_[static_cast<std::size_t>(stream)];
  for (std::int64_t there = progress.load(std::memory_order_acquire); there < needed;
       there = progress.load(std::memory_order_acquire)) {
    progress.wait(there, std::memory_order_acquire);
  }
  return !failed_.load(std::memory_order_acquire);
}

// Wakes every stream; the first error is the one that run() throws.
void StreamThreads::fail(std::exception_ptr error) noexcept {
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    first = !error_;
    if (first) error_ = error;
  }
  failed_.store(true);
  for (auto& progress : progress_) {
    progress.store(std::numeric_limits<std::int64_t>::max());
    progress.notify_all();
  }
  if (first) on_error_(message_of(error));
}

Seconds StreamThreads::since_start(TimePoint t) const {
  return Seconds(std::chrono::duration<double>(t - start_).count());
}

}  // namespace zeroplan
