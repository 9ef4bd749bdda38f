#include "runtime/process_store.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "models/error.h"

namespace zeroplan {

using namespace std::chrono_literals;

namespace {

constexpr std::chrono::milliseconds kLastWords = 500ms;  // a message leaves this host and is read
constexpr std::chrono::milliseconds kLateRanks = 5s;     // a launcher starts all its processes

double seconds(std::chrono::milliseconds time) { return std::chrono::duration<double>(time).count(); }

/// Sixteen bytes that only the ranks of this job know.
std::string random_token() {
  std::array<char, 16> bytes{};
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw DeviceError("getrandom failed: " + error_text(errno));
  }
  return std::string(bytes.data(), bytes.size());
}

std::optional<Hello> decode_hello(const std::string& body) {
  BodyReader reader(body);
  Hello hello;
  hello.job_key = reader.text();
  hello.size = static_cast<int>(reader.number());
  hello.rank = static_cast<int>(reader.number());
  hello.info.host = reader.text();
  hello.info.address = reader.text();
  hello.info.port = static_cast<int>(reader.number());
  return reader.complete() ? std::optional(hello) : std::nullopt;
}

}  // namespace

std::string encode_hello(const Hello& hello) {
  return BodyWriter()
      .text(hello.job_key)
      .number(hello.size)
      .number(hello.rank)
      .text(hello.info.host)
      .text(hello.info.address)
      .number(hello.info.port)
      .body();
}

ProcessStore::ProcessStore(FileDescriptor listener, StoreOptions options)
    : listener_(std::move(listener)), options_(std::move(options)), ranks_(static_cast<std::size_t>(options_.size)) {
  begin_ = last_beat_ = last_turn_ = Clock::now();
  thread_ = std::thread([this] { serve(); });
}

ProcessStore::~ProcessStore() {
  stop_.signal();
  thread_.join();
}

void ProcessStore::serve() {
  while (!finished()) {
    try {
      poll_once();
      check_time();
      settle();
      clients_.remove_if([](const Client& client) { return !client.socket.is_open(); });
    } catch (const std::exception& error) {
      // Out of memory or descriptors: the job cannot go on, and everybody is told so as far as possible.
      fail(fmt::format("rank 0's store failed: {}", error.what()));
      stop_by_ = std::min(stop_by_.value_or(Clock::time_point::max()), Clock::now() + kLastWords);
    }
  }
}

/// How long the reason of a failure is told after rank 0 itself has left.
std::chrono::milliseconds ProcessStore::last_words() const {
  return !welcomed_ && hellos_ < options_.size ? kLateRanks : kLastWords;
}

bool ProcessStore::finished() {
  if (!stop_by_) return false;
  if (Clock::now() >= *stop_by_) return true;
  // Ranks that start late should hear why the job did not form, rather than find nobody.
  const bool late = !welcomed_ && hellos_ < options_.size && Clock::now() < begin_ + options_.connect_limit;
  const bool members = std::any_of(clients_.begin(), clients_.end(), [](const Client& it) { return it.rank >= 0; });
  return !late && !members;
}

void ProcessStore::poll_once() {
  std::vector<pollfd> fds{{listener_.value(), POLLIN, 0}, {stop_by_ ? -1 : stop_.value(), POLLIN, 0}};
  for (const Client& client : clients_) {
    fds.push_back({client.socket.value(), static_cast<short>(POLLIN | (client.out.empty() ? 0 : POLLOUT)), 0});
  }
  const auto turn = std::min<std::chrono::milliseconds>(options_.silence_limit / 8, 500ms);
  if (poll(fds.data(), fds.size(), static_cast<int>(std::max(turn, 10ms).count())) < 0 && errno != EINTR) {
    throw DeviceError("poll failed: " + error_text(errno));
  }
  // A rank that fails to leave must not hold up rank 0 for ever; after a failure there is nothing to wait for.
  if (fds[1].revents != 0) stop_by_ = Clock::now() + (failure_.empty() ? options_.wait_limit : last_words());
  if (fds[0].revents != 0) accept_clients();  // first: who came in time is read in time
  read_all();
  for (Client& client : clients_) flush(client);
}

void ProcessStore::accept_clients() {
  for (FileDescriptor socket = accept_one(listener_.value()); socket.is_open();
       socket = accept_one(listener_.value())) {
    Client& client = clients_.emplace_back();
    client.host = peer_host(socket.value());
    client.socket = std::move(socket);
    client.heard = Clock::now();
  }
}

void ProcessStore::read_all() {
  for (Client& client : clients_) read_client(client);
}

void ProcessStore::read_client(Client& client) {
  std::array<char, 16384> buffer;
  while (client.socket.is_open() && !client.closing) {
    const IoResult result = receive_some(client.socket.value(), buffer.data(), buffer.size());
    if (result.state == IoResult::State::closed) return drop(client);
    if (result.state == IoResult::State::would_block) return;
    client.heard = Clock::now();
    client.frames.append({buffer.data(), result.bytes});
    while (const std::optional<Frame> frame = client.frames.next()) handle(client, *frame);
    if (client.frames.fault() != FrameReader::Fault::none) refuse_foreign(client);
  }
}

/// Sends what goes at once, and closes a connection that has nothing more to say.
void ProcessStore::flush(Client& client) {
  while (client.socket.is_open() && !client.out.empty()) {
    iovec part{client.out.data(), client.out.size()};
    const IoResult result = send_some(client.socket.value(), {&part, 1});
    // Its last words may say why: whoever reads finds the end.
    if (result.state == IoResult::State::closed) client.out.clear();
    if (result.state != IoResult::State::moved) break;
    client.out.erase(0, result.bytes);
  }
  if (!client.out.empty()) return;
  if (!client.closing) return;
  if (client.rank >= 0) ranks_[static_cast<std::size_t>(client.rank)].client = nullptr;
  client.socket.close();
}

/// Its connection ended.
void ProcessStore::drop(Client& client) {
  client.socket.close();
  if (client.rank < 0) return;
  Rank& rank = ranks_[static_cast<std::size_t>(client.rank)];
  rank.client = nullptr;
  if (!rank.left) {
    judge(
        Evidence::end,
        fmt::format("rank {} ended without leaving (its connection closed: killed, crashed or cut off)", client.rank));
  }
}

void ProcessStore::handle(Client& client, const Frame& frame) {
  if (client.closing) return;
  if (client.rank < 0) {
    if (frame.type == FrameType::hello) return say_hello(client, frame);
    return refuse(client, "expected a hello first");
  }
  switch (frame.type) {
    case FrameType::exchange:
      return take_text(client, frame);
    case FrameType::failure:
      return judge(Evidence::cause, BodyReader(frame.body).text());
    case FrameType::symptom:
      return judge(Evidence::symptom, BodyReader(frame.body).text());
    case FrameType::goodbye:
      ranks_[static_cast<std::size_t>(client.rank)].left = true;
      client.closing = true;
      return check_exchange();
    case FrameType::beat:
      return;
    case FrameType::hello:
    case FrameType::welcome:
    case FrameType::texts:
      return fail(fmt::format("rank {} sent the store a message that only the store sends", client.rank));
  }
}

void ProcessStore::say_hello(Client& client, const Frame& frame) {
  const std::optional<Hello> hello = decode_hello(frame.body);
  const std::string who = fmt::format("a process on {}", client.host);
  ++hellos_;
  if (!hello) return refuse(client, who + " sent a hello that cannot be read");
  if (hello->job_key != options_.job_key) {
    return refuse(client, fmt::format("{}, rank {} of another job (key \"{}\", this job's is \"{}\"), came to this job",
                                      who, hello->rank, hello->job_key, options_.job_key));
  }
  if (hello->size != options_.size) {
    return refuse(client, fmt::format("rank {} ({}) is of {} ranks, rank 0 of {}: wrong world size", hello->rank, who,
                                      hello->size, options_.size));
  }
  if (hello->rank < 0 || hello->rank >= options_.size) {
    return refuse(client, fmt::format("{} says it is rank {} of {}", who, hello->rank, options_.size));
  }
  Rank& rank = ranks_[static_cast<std::size_t>(hello->rank)];
  if (rank.joined) {
    return refuse(client, fmt::format("two processes are rank {}: on {} and on {}", hello->rank,
                                      rank.hello.info.address, client.host));
  }
  rank.joined = true;
  rank.client = &client;
  rank.hello = *hello;
  client.rank = hello->rank;
  client.frames.allow(kLongestText + 4096);
  if (!failure_.empty()) return send(client, encode_frame(FrameType::failure, BodyWriter().text(failure_).body()));
  welcome_all();
}

/// Before all ranks have met, whoever says something wrong may be one of them: the job fails. A running job goes on.
void ProcessStore::refuse(Client& client, const std::string& reason) {
  if (!welcomed_) fail(reason);
  send(client, encode_frame(FrameType::failure, BodyWriter().text("refused by the store: " + reason).body()));
  client.closing = true;
}

void ProcessStore::refuse_foreign(Client& client) {
  switch (client.frames.fault()) {
    case FrameReader::Fault::none:
      return;
    case FrameReader::Fault::version:
      ++hellos_;
      return refuse(client, fmt::format("a process on {} speaks version {} of the protocol, rank 0 version {}",
                                        client.host, client.frames.version(), kWireVersion));
    case FrameReader::Fault::foreign:
      // A port scanner or a browser must not end a job; if a rank stays away, the error will tell of this one.
      stranger_ = client.host;
      if (client.rank >= 0) break;
      client.socket.close();
      return;
    case FrameReader::Fault::too_long:
      break;
  }
  if (client.rank >= 0) fail(fmt::format("rank {} sent what is no message", client.rank));
  refuse(client, "that is no message");
}

void ProcessStore::welcome_all() {
  if (!std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.joined; })) return;
  welcomed_ = true;
  BodyWriter body;
  body.text(random_token());
  for (const Rank& rank : ranks_) {
    body.text(rank.hello.info.host).text(rank.hello.info.address).number(rank.hello.info.port);
  }
  for (const Rank& rank : ranks_) {
    if (rank.client != nullptr) send(*rank.client, encode_frame(FrameType::welcome, body.body()));
  }
}

void ProcessStore::take_text(Client& client, const Frame& frame) {
  if (!failure_.empty()) return;  // a failed job has no more exchanges, though the last text may come only now
  BodyReader reader(frame.body);
  const auto kind = static_cast<CallKind>(reader.number());
  std::string text = reader.text();
  Rank& rank = ranks_[static_cast<std::size_t>(client.rank)];
  if (!reader.complete() || rank.text || !welcomed_) {
    return fail(fmt::format("rank {} sent the store an exchange that does not belong", client.rank));
  }
  for (int other = 0; other < options_.size; ++other) {
    const auto& theirs = ranks_[static_cast<std::size_t>(other)].text;
    if (theirs && theirs->first != kind) {
      return fail(describe_mismatch(client.rank, {kind}, other, {theirs->first}, where()));
    }
  }
  if (texts_ == 0) first_text_ = Clock::now();
  rank.text.emplace(kind, std::move(text));
  if (++texts_ == options_.size) return finish_exchange();
  check_exchange();
}

void ProcessStore::finish_exchange() {
  BodyWriter body;
  for (const Rank& rank : ranks_) body.text(rank.text->second);
  const std::string bytes = encode_frame(FrameType::texts, body.body());
  for (Rank& rank : ranks_) {
    rank.text.reset();
    if (rank.client != nullptr) send(*rank.client, bytes);
  }
  texts_ = 0;
  ++exchanges_;
}

std::vector<int> ProcessStore::ranks_where(bool (*holds)(const Rank&)) const {
  std::vector<int> result;
  for (int rank = 0; rank < options_.size; ++rank) {
    if (holds(ranks_[static_cast<std::size_t>(rank)])) result.push_back(rank);
  }
  return result;
}

std::string ProcessStore::where() const { return fmt::format("all ranks, call {}", exchanges_); }

void ProcessStore::check_time() {
  const Clock::time_point now = Clock::now();
  // If this process itself did not run, the others' messages may be on their way: nobody is judged in this turn.
  const bool slept = now - last_turn_ > options_.silence_limit / 2;
  last_turn_ = now;
  check_formation();
  check_exchange();
  for (Client& client : clients_) {
    if (slept || client.closing) client.heard = now;
    const auto silent = now - client.heard;
    if (client.rank >= 0 && silent > options_.silence_limit) {
      fail(fmt::format("rank {} has been silent for {:.3g} s (stopped, or its network is down)", client.rank,
                       std::chrono::duration<double>(silent).count()));
    }
    if (client.rank < 0 && silent > options_.connect_limit) client.socket.close();
  }
  beat();
}

void ProcessStore::check_formation() {
  if (welcomed_ || Clock::now() < begin_ + options_.connect_limit) return;
  const std::string stranger =
      stranger_.empty() ? "" : fmt::format("; a process on {} came that does not speak our protocol", stranger_);
  fail(fmt::format("{} did not come within {:.3g} s{}",
                   name_ranks(ranks_where([](const Rank& rank) { return !rank.joined; })),
                   seconds(options_.connect_limit), stranger));
}

void ProcessStore::check_exchange() {
  if (texts_ == 0 || !failure_.empty()) return;
  const int waiting = ranks_where([](const Rank& rank) { return rank.text.has_value(); }).front();
  const std::string call = describe({ranks_[static_cast<std::size_t>(waiting)].text->first});
  const auto gone = ranks_where([](const Rank& rank) { return rank.left && !rank.text; });
  if (!gone.empty()) {
    return judge(Evidence::symptom,
                 fmt::format("{} left while rank {} waited in {} ({})", name_ranks(gone), waiting, call, where()));
  }
  if (Clock::now() < first_text_ + options_.wait_limit) return;
  const auto missing = ranks_where([](const Rank& rank) { return !rank.text; });
  judge(Evidence::symptom, fmt::format("rank {} waited {:.3g} s in {} ({}) for {}", waiting,
                                       seconds(options_.wait_limit), call, where(), name_ranks(missing)));
}

void ProcessStore::beat() {
  const Clock::time_point now = Clock::now();
  if (now < last_beat_ + options_.silence_limit / 5) return;
  last_beat_ = now;
  for (Client& client : clients_) {
    // What waits in `out` will be heard as well; a stopped rank must not pile up beats.
    if (client.rank >= 0 && client.out.empty()) send(client, encode_frame(FrameType::beat));
  }
}

void ProcessStore::judge(Evidence evidence, const std::string& reason) {
  if (evidence == Evidence::cause) return fail(reason);
  if (!suspicion_ || evidence > suspicion_->first) suspicion_.emplace(evidence, reason);
}

/// A symptom was sent after the cause that it follows from, which therefore has come too, but perhaps from a client
/// that was read before: everybody is read once more.
void ProcessStore::settle() {
  if (!suspicion_) return;
  if (failure_.empty()) read_all();
  fail(suspicion_->second);
  suspicion_.reset();
}

void ProcessStore::fail(const std::string& reason) {
  if (!failure_.empty()) return;
  failure_ = reason;
  if (stop_by_) stop_by_ = std::min<Clock::time_point>(*stop_by_, Clock::now() + last_words());
  const std::string bytes = encode_frame(FrameType::failure, BodyWriter().text(reason).body());
  for (Client& client : clients_) {
    if (client.rank >= 0) send(client, bytes);
  }
}

/// Sends what goes at once; poll_once() sends the rest. Drops no client: callers walk over them.
void ProcessStore::send(Client& client, const std::string& bytes) {
  if (!client.socket.is_open() || client.closing) return;
  client.out += bytes;
  iovec part{client.out.data(), client.out.size()};
  const IoResult result = send_some(client.socket.value(), {&part, 1});
  client.out.erase(0, result.bytes);
}

}  // namespace zeroplan
