#pragma once
// The meeting point of a job of processes, served by rank 0: ranks say hello, learn each other's addresses, exchange
// small texts, and hear of the first failure. It judges: a rank whose connection ends without goodbye, or that is
// silent too long, ends the job. Of what it knows by then the cause is told, not what follows from it.

#include <chrono>
#include <list>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "runtime/collective_call.h"
#include "runtime/frames.h"
#include "runtime/sockets.h"

namespace zeroplan {

/// What every rank of a job is told about every other one.
struct PeerInfo {
  std::string host;     // equal for ranks that can share memory
  std::string address;  // where its data listener is
  int port = 0;
};

/// What a rank says first.
struct Hello {
  std::string job_key;
  int size = 0, rank = 0;
  PeerInfo info;
};
std::string encode_hello(const Hello& hello);

struct StoreOptions {
  int size = 1;
  std::string job_key;
  std::chrono::milliseconds wait_limit, connect_limit, silence_limit;
};

inline constexpr std::size_t kLongestText = std::size_t{64} << 20;

class ProcessStore {
 public:
  /// Serves from now on, on a thread of its own.
  ProcessStore(FileDescriptor listener, StoreOptions options);
  /// Serves until all ranks are gone, but no longer than the wait limit.
  ~ProcessStore();
  ProcessStore(const ProcessStore&) = delete;
  ProcessStore& operator=(const ProcessStore&) = delete;

 private:
  using Clock = std::chrono::steady_clock;

  struct Client {
    FileDescriptor socket;
    std::string host;
    FrameReader frames{4096};  // enough for a hello
    std::string out;
    Clock::time_point heard;
    int rank = -1;
    bool closing = false;  // after what is in `out`
  };
  struct Rank {
    Client* client = nullptr;
    Hello hello;
    bool joined = false, left = false;
    std::optional<std::pair<CallKind, std::string>> text;  // of the exchange in progress
  };

  /// What a reason of failure rests on, weakest first: what may follow from another rank's failure, the end of a rank's
  /// connection, what cannot follow from anything.
  enum class Evidence { symptom, end, cause };

  void serve();
  bool finished();
  std::chrono::milliseconds last_words() const;
  void poll_once();
  void accept_clients();
  void read_all();
  void read_client(Client& client);
  void flush(Client& client);
  void drop(Client& client);
  void handle(Client& client, const Frame& frame);
  void say_hello(Client& client, const Frame& frame);
  void refuse(Client& client, const std::string& reason);
  void refuse_foreign(Client& client);
  void welcome_all();
  void take_text(Client& client, const Frame& frame);
  void finish_exchange();
  void check_time();
  void check_formation();
  void check_exchange();
  void beat();
  void judge(Evidence evidence, const std::string& reason);
  void settle();
  void fail(const std::string& reason);
  void send(Client& client, const std::string& bytes);
  std::string where() const;
  std::vector<int> ranks_where(bool (*holds)(const Rank&)) const;

  FileDescriptor listener_;
  const StoreOptions options_;
  StickyEvent stop_;
  std::list<Client> clients_;  // addresses stay
  std::vector<Rank> ranks_;
  bool welcomed_ = false;
  int hellos_ = 0;
  std::string failure_;
  std::optional<std::pair<Evidence, std::string>> suspicion_;  // for settle()
  std::string stranger_;                                       // the last connection refused for what it said
  std::int64_t exchanges_ = 0;
  int texts_ = 0;
  Clock::time_point first_text_, begin_, last_beat_, last_turn_;
  std::optional<Clock::time_point> stop_by_;
  std::thread thread_;  // last: it uses all above
};

}  // namespace zeroplan
