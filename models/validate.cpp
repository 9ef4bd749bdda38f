// Races, leaks and uses after free of a flat schedule, by vector clocks: one entry per stream, the last op of that
// stream that happens before.

#include <fmt/format.h>

#include <array>
#include <stdexcept>

#include "models/schedule.h"

namespace zeroplan {
namespace {

using Clock = std::array<std::int32_t, kNumStreams>;

class Validator {
 public:
  Validator(const Schedule& schedule, const ModelSpec& model) : schedule_(schedule), model_(model) {}

  void run() {
    if (schedule_.folded()) throw std::logic_error("validate: needs a flat schedule");
    const auto ops = schedule_.ops();
    clocks_.resize(ops.size());
    buffers_.resize(schedule_.buffers().size());
    last_.fill(-1);
    for (std::size_t i = 0; i < ops.size(); ++i) {
      advance(static_cast<std::int32_t>(i));
      for (const Operand& operand : schedule_.operands(ops[i])) touch(static_cast<std::int32_t>(i), operand);
    }
    for (std::size_t b = 0; b < buffers_.size(); ++b) {
      if (buffers_[b].allocated) fail("is never freed", b, -1);
    }
  }

 private:
  struct State {
    bool allocated = false;
    std::int32_t last_write = -1;
    Clock last_read = filled(-1);  // by stream
  };
  static Clock filled(std::int32_t v) {
    Clock c;
    c.fill(v);
    return c;
  }

  void advance(std::int32_t i) {
    const Op& op = schedule_.ops()[static_cast<std::size_t>(i)];
    const auto stream = static_cast<std::size_t>(op.stream);
    Clock clock = last_[stream] >= 0 ? clocks_[static_cast<std::size_t>(last_[stream])] : filled(-1);
    for (OpRef ref : schedule_.after(op)) {
      const Clock& other = clocks_[ref.index()];
      for (std::size_t s = 0; s < kNumStreams; ++s) clock[s] = std::max(clock[s], other[s]);
    }
    clock[stream] = i;
    clocks_[static_cast<std::size_t>(i)] = clock;
    last_[stream] = i;
  }

  bool before(std::int32_t a, std::int32_t b) const {
    const auto stream = static_cast<std::size_t>(schedule_.ops()[static_cast<std::size_t>(a)].stream);
    return clocks_[static_cast<std::size_t>(b)][stream] >= a;
  }

  void touch(std::int32_t i, const Operand& operand) {
    const Op& op = schedule_.ops()[static_cast<std::size_t>(i)];
    const Buffer& buffer = schedule_.buffer(operand.buffer);
    State& state = buffers_[operand.buffer.index];
    const Work& work = schedule_.work(op);
    const bool alloc = std::holds_alternative<Alloc>(work);
    const bool free = std::holds_alternative<Free>(work);
    if ((alloc || free) && op.stream != Stream::compute)
      fail("is allocated or freed off the compute stream", operand.buffer.index, i);
    if (buffer.lifetime == Lifetime::step) {
      if (alloc && state.allocated) fail("is allocated twice", operand.buffer.index, i);
      if (!alloc && !state.allocated) fail("is used outside its lifetime", operand.buffer.index, i);
      if (alloc) state.allocated = true;
      if (free) state.allocated = false;
    } else if (alloc || free) {
      fail("is resident but allocated or freed", operand.buffer.index, i);
    }
    const bool writes = alloc || free || operand.access != Access::read;
    if (state.last_write >= 0 && !before(state.last_write, i)) race(state.last_write, i, operand.buffer);
    if (writes) {
      for (std::size_t s = 0; s < kNumStreams; ++s) {
        const std::int32_t reader = state.last_read[s];
        if (reader >= 0 && reader != i && !before(reader, i)) race(reader, i, operand.buffer);
      }
      state.last_write = i;
      state.last_read.fill(-1);
    } else {
      state.last_read[static_cast<std::size_t>(op.stream)] = i;
    }
  }

  std::string name(std::int32_t i) const {
    return i < 0 ? std::string("the end of the step")
                 : fmt::format("op {} '{}'", i, label(schedule_, schedule_.ops()[static_cast<std::size_t>(i)], model_));
  }
  [[noreturn]] void fail(std::string_view what, std::size_t buffer, std::int32_t i) const {
    throw std::logic_error(
        fmt::format("schedule: buffer '{}' {} at {}", label(schedule_.buffers()[buffer], model_), what, name(i)));
  }
  [[noreturn]] void race(std::int32_t a, std::int32_t b, BufferId buffer) const {
    throw std::logic_error(fmt::format("schedule: race on buffer '{}': no path from {} to {}",
                                       label(schedule_.buffer(buffer), model_), name(a), name(b)));
  }

  const Schedule& schedule_;
  const ModelSpec& model_;
  std::vector<Clock> clocks_;
  std::vector<State> buffers_;
  std::array<std::int32_t, kNumStreams> last_{};
};

}  // namespace

void validate(const Schedule& schedule, const ModelSpec& model) { Validator(schedule, model).run(); }

}  // namespace zeroplan
