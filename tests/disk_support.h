#pragma once
// What the tests of the disk tier share: a player that knows what the file must hold.

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "models/error.h"
#include "runtime/arena_memory.h"
#include "runtime/disk.h"
#include "runtime/disk_queue.h"
#include "tests/catch.h"
#include "tests/child_process.h"

namespace zeroplan::tests {

using Data = std::vector<std::byte>;

inline DiskOptions options_in(const TemporaryDirectory& directory) {
  DiskOptions options;
  options.directory = directory.path();
  return options;
}

inline Data random_data(std::mt19937& random, std::size_t size) {
  Data data(size);
  for (std::byte& b : data) b = static_cast<std::byte>(random());
  return data;
}

inline std::string all_notes(const DiskFile& file) {
  std::string text;
  for (const std::string& note : file.notes()) text += note + "\n";
  return text;
}

inline bool uring_here() {
  static const bool here = [] {
    const TemporaryDirectory directory;
    const std::vector<std::int64_t> sizes{4096};
    return DiskFile(options_in(directory), sizes).engine() == DiskEngine::uring;
  }();
  if (!here) WARN("io_uring is not available here: its part of the test is skipped");
  return here;
}

inline std::vector<DiskEngine> engines() {
  return uring_here() ? std::vector{DiskEngine::uring, DiskEngine::threads} : std::vector{DiskEngine::threads};
}

// Reads and writes random parts of its own buffers and compares with what it wrote.
class Player {
 public:
  Player(DiskFile& file, std::vector<std::int64_t> sizes, int first, int step, unsigned seed)
      : file_(file), random_(seed), memory_(Bytes(1 << 20), {"player", 256, false}) {
    memory_.mark_used(0, memory_.size());
    for (int b = first; b < static_cast<int>(sizes.size()); b += step)
      model_[b] = Data(static_cast<std::size_t>(sizes[static_cast<std::size_t>(b)]));
  }

  // Number of differences.
  int play(int rounds) {
    int wrong = 0;
    for (int i = 0; i < rounds; ++i) {
      auto it = std::next(model_.begin(), draw(static_cast<std::int64_t>(model_.size()) - 1));
      auto& [buffer, data] = *it;
      const auto size = static_cast<std::int64_t>(data.size());
      const std::int64_t step = draw(2) == 0 ? 1 : kDiskAlignment;  // a part may begin and end anywhere
      const std::int64_t begin = draw(size / step) * step;
      const std::int64_t end = draw(1) == 0 ? size : begin + draw((size - begin) / step) * step;
      if (draw(1) == 0)
        write(buffer, data, begin, end);
      else
        wrong += read(buffer, data, begin, end);
    }
    for (auto& [buffer, data] : model_) wrong += read(buffer, data, 0, static_cast<std::int64_t>(data.size()));
    return wrong;
  }

 private:
  std::int64_t draw(std::int64_t most) { return std::uniform_int_distribution<std::int64_t>(0, most)(random_); }

  // Buffers in arenas lie at multiples of 256; other memory is allowed too.
  std::span<std::byte> memory(std::int64_t size) {
    const std::int64_t step = draw(3) == 0 ? 1 : 256;
    return memory_.bytes(draw((memory_.size() - size) / step) * step, size);
  }

  void write(int buffer, Data& data, std::int64_t begin, std::int64_t end) {
    const std::span<std::byte> from = memory(end - begin);
    const auto salt = static_cast<unsigned>(random_());
    for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>((salt >> (i % 24)) + i);
    std::ranges::copy(from, data.begin() + begin);
    file_.write(buffer, begin, from);
  }

  int read(int buffer, const Data& data, std::int64_t begin, std::int64_t end) {
    const std::span<std::byte> to = memory(end - begin);
    std::ranges::fill(to, std::byte{0xee});
    file_.read(buffer, begin, to);
    return std::equal(to.begin(), to.end(), data.begin() + begin) ? 0 : 1;
  }

  DiskFile& file_;
  std::mt19937 random_;
  ArenaMemory memory_;
  std::map<int, Data> model_;
};

struct Fault {
  enum class Kind { shorter, nothing, error, too_much, throws } kind = Kind::error;
  int code = 0;            // errno of an error
  std::int64_t bytes = 0;  // that a shorter transfer moves
};

// Threads with faults: `plan(n)` says what happens to the n-th request of this direction.
class FaultyBackend final : public DiskBackend {
 public:
  using Plan = std::function<std::optional<Fault>(int)>;
  FaultyBackend(const DiskTarget& target, Plan plan) : real_(make_thread_backend(target)), plan_(std::move(plan)) {}

  void submit(const DiskRequest& request) override {
    const std::optional<Fault> fault = plan_(count_++);
    if (!fault) return forward(request);
    switch (fault->kind) {
      case Fault::Kind::shorter: {
        DiskRequest less = request;
        less.size = std::min(request.size, fault->bytes);
        return forward(less);
      }
      case Fault::Kind::nothing:
        return made_up_.push_back({request.slot, 0});
      case Fault::Kind::error:
        return made_up_.push_back({request.slot, -fault->code});
      case Fault::Kind::too_much:
        return made_up_.push_back({request.slot, request.size + 1});
      case Fault::Kind::throws:
        throw DeviceError("the ring broke");
    }
  }

  void wait(std::vector<DiskCompletion>& done) override {
    done.insert(done.end(), made_up_.begin(), made_up_.end());
    const bool some = !made_up_.empty();
    made_up_.clear();
    if (some) return;
    const std::size_t before = done.size();
    real_->wait(done);
    in_flight_ -= static_cast<int>(done.size() - before);
  }

  ~FaultyBackend() override {
    if (in_flight_ != 0) std::terminate();  // an error must not leave anything in flight
  }

 private:
  void forward(const DiskRequest& request) {
    ++in_flight_;
    real_->submit(request);
  }
  std::unique_ptr<DiskBackend> real_;
  Plan plan_;
  std::vector<DiskCompletion> made_up_;
  int count_ = 0, in_flight_ = 0;
};

inline DiskFile::MakeBackend faulty(FaultyBackend::Plan plan) {
  return [plan = std::move(plan)](const DiskTarget& target) { return std::make_unique<FaultyBackend>(target, plan); };
}

inline const std::vector<std::int64_t> kSizes{4096,       256,  0,      100'000, 8192,    1,
                                              256 * 1001, 4097, 65'536, 4095,    300'032, 512};

}  // namespace zeroplan::tests
