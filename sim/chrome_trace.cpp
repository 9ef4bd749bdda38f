#include "sim/chrome_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <vector>

namespace zeroplan {
namespace {

// Processes of the trace: Perfetto shows each as a group of tracks.
constexpr int kStreamsProcess = 1, kMemoryProcess = 2, kUseProcess = 3;

class Writer {
 public:
  Writer(const Schedule& schedule, const ModelSpec& model, const Trace& trace)
      : schedule_(schedule), model_(model), trace_(trace) {}

  std::string write(int rank, const Simulation* simulation) {
    text_ = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
    process(kStreamsProcess, fmt::format("rank {}", rank));
    process(kMemoryProcess, fmt::format("memory of rank {}", rank));
    for (int s = 0; s < kNumStreams; ++s) thread(s);
    ops();
    memory();
    if (simulation != nullptr) use(rank, *simulation);
    text_ += "\n]}\n";
    return std::move(text_);
  }

 private:
  template <class... Arguments>
  void event(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
    if (!first_) text_ += ",\n";
    first_ = false;
    fmt::format_to(std::back_inserter(text_), format, std::forward<Arguments>(arguments)...);
  }

  static std::string quoted(std::string_view text) {
    std::string out = "\"";
    for (const char c : text) {
      if (c == '"' || c == '\\') out += '\\';
      if (static_cast<unsigned char>(c) < 0x20) {
        out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
      } else {
        out += c;
      }
    }
    return out + '"';
  }

  /// Microseconds to a thousandth: nanoseconds.
  static std::string micros(Seconds time) { return fmt::format("{:.3f}", time.base() * 1e6); }

  void process(int id, const std::string& name) {
    event(R"({{"ph":"M","name":"process_name","pid":{},"args":{{"name":{}}}}})", id, quoted(name));
    event(R"({{"ph":"M","name":"process_sort_index","pid":{},"args":{{"sort_index":{}}}}})", id, id);
  }
  void thread(int stream) {
    event(R"({{"ph":"M","name":"thread_name","pid":{},"tid":{},"args":{{"name":{}}}}})", kStreamsProcess, stream,
          quoted(to_string(static_cast<Stream>(stream))));
    event(R"({{"ph":"M","name":"thread_sort_index","pid":{},"tid":{},"args":{{"sort_index":{}}}}})", kStreamsProcess,
          stream, stream);
  }

  bool takes_time(std::size_t op) const { return trace_.ops[op].end > trace_.ops[op].start; }

  static double bytes_moved(const Work& work) {
    if (const auto* copy = std::get_if<Copy>(&work)) return copy->bytes.base();
    if (const auto* collective = std::get_if<Collective>(&work)) return collective->message().base();
    return 0;
  }

  void ops() {
    constexpr std::size_t kNone = static_cast<std::size_t>(-1);
    const auto all = schedule_.ops();
    std::vector<std::size_t> source(all.size(), kNone);  // of an arrow that comes from here: the op that took time
    std::array<std::size_t, kNumStreams> last;
    last.fill(kNone);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto s = static_cast<std::size_t>(all[i].stream);
      if (takes_time(i)) {
        slice(i);
        for (OpRef ref : schedule_.after(all[i])) {
          const std::size_t from = source[ref.index()];
          if (from != kNone && all[from].stream != all[i].stream) arrow(from, i);
        }
        source[i] = last[s] = i;
        continue;
      }
      // Through ops without a length an arrow comes from whatever ended last before them.
      std::size_t from = last[s];
      for (OpRef ref : schedule_.after(all[i])) {
        const std::size_t other = source[ref.index()];
        if (other != kNone && (from == kNone || trace_.ops[other].end > trace_.ops[from].end)) from = other;
      }
      source[i] = from;
    }
  }

  void slice(std::size_t i) {
    const Op& op = schedule_.ops()[i];
    const Span& span = trace_.ops[i];
    const double bytes = bytes_moved(schedule_.work(op));
    const std::string moved = bytes > 0 ? fmt::format(",\"bytes\":{:.0f}", bytes) : "";
    event(R"({{"ph":"X","name":{},"cat":"{}","pid":{},"tid":{},"ts":{},"dur":{},"args":{{"op":{}{}}}}})",
          quoted(label(schedule_, op, model_)), to_string(op.phase), kStreamsProcess, static_cast<int>(op.stream),
          micros(span.start), micros(span.end - span.start), i, moved);
  }

  void arrow(std::size_t from, std::size_t to) {
    ++arrows_;
    const auto end = [&](const char* phase, std::size_t op, Seconds time, const char* more) {
      event(R"({{"ph":"{}","name":"after","cat":"edge","id":{},"pid":{},"tid":{},"ts":{}{}}})", phase, arrows_,
            kStreamsProcess, static_cast<int>(schedule_.ops()[op].stream), micros(time), more);
    };
    // Readers bind an arrow to the slice that is open at its time: a nanosecond before the end.
    const Span& source = trace_.ops[from];
    end("s", from, std::max(source.start, source.end - Seconds(1e-9)), "");
    end("f", to, trace_.ops[to].start, R"(,"bp":"e")");
  }

  // --- counters --------------------------------------------------------------------------------------

  void memory() {
    std::array<double, kNumMemories> live{};
    std::array<bool, kNumMemories> used{};
    for (const Buffer& buffer : schedule_.buffers()) {
      const auto m = static_cast<std::size_t>(buffer.memory);
      used[m] = true;
      if (buffer.lifetime == Lifetime::resident) live[m] += buffer.size.base();
    }
    const auto count = [&](std::size_t m, Seconds time) {
      event(R"({{"ph":"C","name":"{} memory","pid":{},"ts":{},"args":{{"bytes":{:.0f}}}}})",
            to_string(static_cast<Memory>(m)), kMemoryProcess, micros(time), live[m]);
    };
    for (std::size_t m = 0; m < kNumMemories; ++m) {
      if (used[m]) count(m, Seconds());
    }
    for (std::size_t i = 0; i < schedule_.ops().size(); ++i) {
      const Op& op = schedule_.ops()[i];
      const bool born = std::holds_alternative<Alloc>(schedule_.work(op));
      if (!born && !std::holds_alternative<Free>(schedule_.work(op))) continue;
      std::array<bool, kNumMemories> changed{};
      for (const Operand& operand : schedule_.operands(op)) {
        const Buffer& buffer = schedule_.buffer(operand.buffer);
        const auto m = static_cast<std::size_t>(buffer.memory);
        live[m] += born ? buffer.size.base() : -buffer.size.base();
        changed[m] = true;
      }
      for (std::size_t m = 0; m < kNumMemories; ++m) {
        if (changed[m]) count(m, trace_.ops[i].end);
      }
    }
    // Counters last as long as the step.
    Seconds end;
    for (const Span& span : trace_.ops) end = std::max(end, span.end);
    for (std::size_t m = 0; m < kNumMemories; ++m) {
      if (used[m]) count(m, end);
    }
  }

  /// Of the rank's own GPU and of what the node shares; the other GPUs' links are left out.
  static bool concerns(const std::string& resource, int gpu) {
    return !resource.starts_with("gpu ") || resource.starts_with(fmt::format("gpu {} ", gpu));
  }

  void use(int rank, const Simulation& simulation) {
    const auto gpus = std::max<std::int64_t>(1, simulation.gpus_per_node);
    process(kUseProcess, "use of resources, percent");
    for (const UtilisationSample& sample : simulation.utilisation) {
      const std::string& name = simulation.resources[sample.resource].name;
      if (!concerns(name, static_cast<int>(rank % gpus))) continue;
      event(R"({{"ph":"C","name":{},"pid":{},"ts":{},"args":{{"percent":{:.2f}}}}})", quoted(name), kUseProcess,
            micros(sample.time), 100 * sample.utilisation);
    }
  }

  const Schedule& schedule_;
  const ModelSpec& model_;
  const Trace& trace_;
  std::string text_;
  bool first_ = true;
  int arrows_ = 0;
};

}  // namespace

std::string chrome_trace(const Schedule& schedule, const ModelSpec& model, const Trace& trace, int rank,
                         const Simulation* simulation) {
  if (schedule.folded() || trace.ops.size() != schedule.ops().size()) {
    throw std::logic_error("chrome_trace: the trace is not of this flat schedule");
  }
  return Writer(schedule, model, trace).write(rank, simulation);
}

}  // namespace zeroplan
