#pragma once
// One rank's side of the store: the connection, a thread that keeps it alive and listens for failures, exchanges.

#include <atomic>
#include <condition_variable>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "runtime/process_communicator.h"
#include "runtime/process_store.h"

namespace zeroplan {

class ProcessJob {
 public:
  using Clock = std::chrono::steady_clock;

  /// Meets all ranks; on rank 0 it also serves the store. `info` gives what the others are told, with this host's
  /// address as the store sees it; it is asked once the store is reached: a port that a rank took before might be the
  /// store's.
  ProcessJob(const ProcessWorldOptions& options, const std::function<PeerInfo()>& info);
  ~ProcessJob();
  ProcessJob(const ProcessJob&) = delete;
  ProcessJob& operator=(const ProcessJob&) = delete;

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  const ProcessWorldOptions& options() const { return options_; }
  /// Sixteen bytes that only this job's ranks know.
  const std::string& token() const { return token_; }
  /// Reachable from here.
  const PeerInfo& peer(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }

  std::vector<std::string> exchange(CallKind kind, const std::string& text);

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  /// A descriptor that is readable once the job has failed.
  int failure_event() const { return failure_event_.value(); }
  [[noreturn]] void throw_failure() const;
  /// Ends the job for this rank at once, and tells the others; nothing after a failure. Never throws.
  void abort(const std::string& reason) noexcept;
  /// Tells the store, waits for its verdict, which is the same for all ranks and may be another reason, and throws it.
  [[noreturn]] void report(const std::string& reason) { report_as(FrameType::failure, reason); }
  /// Same, of what may follow from another rank's failure: a rank that left or does not come, a link that ended.
  [[noreturn]] void report_symptom(const std::string& reason) { report_as(FrameType::symptom, reason); }
  /// Whether the job has failed by then.
  bool wait_failed(std::chrono::milliseconds limit);

 private:
  [[noreturn]] void report_as(FrameType type, const std::string& reason);
  void connect(const std::function<PeerInfo()>& info);
  void stop() noexcept;
  void listen();
  void read_store();
  void handle(const Frame& frame);
  void take_welcome(const std::string& body);
  void lose_store(const std::string& why);
  void keep_alive();
  void send(const std::string& bytes);
  void flush();
  void fail(const std::string& reason);

  const ProcessWorldOptions options_;
  std::unique_ptr<ProcessStore> store_;  // on rank 0
  std::string store_host_;               // numeric
  FileDescriptor socket_;
  FrameReader frames_{std::numeric_limits<std::size_t>::max()};
  std::string token_;
  std::vector<PeerInfo> peers_;

  StickyEvent failure_event_, wake_;
  std::atomic<bool> failed_ = false;
  mutable std::mutex mutex_;  // guards all below; token_ and peers_ until welcomed_
  std::condition_variable changed_;
  std::string reason_, out_;
  std::optional<std::vector<std::string>> texts_;
  bool welcomed_ = false, leaving_ = false, lost_ = false;
  Clock::time_point heard_, last_turn_, last_beat_, leave_by_;
  std::thread thread_;
};

}  // namespace zeroplan
