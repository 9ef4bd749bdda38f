#include "tests/unfold.h"

#include <algorithm>
#include <array>
#include <optional>

namespace zeroplan::tests {
namespace {

constexpr std::uint32_t kNothing = 0xffffffff;

class Unfolder {
 public:
  explicit Unfolder(const Schedule& schedule)
      : schedule_(schedule), latest_(schedule.ops().size(), kNothing), carried_(schedule.carried().size(), kNothing) {}

  std::vector<UnfoldedOp> run() {
    range(0, static_cast<std::uint32_t>(schedule_.ops().size()), {});
    return std::move(list_);
  }

 private:
  std::uint32_t resolve(OpRef ref) const {
    if (ref.none()) return kNothing;
    return ref.carried() ? carried_[ref.index()] : latest_[ref.index()];
  }

  /// The outermost repeat inside [begin, end) that starts at `begin`, not among those already entered.
  std::optional<std::size_t> repeat_at(std::uint32_t begin, const std::vector<std::size_t>& entered) const {
    for (std::size_t r = 0; r < schedule_.repeats().size(); ++r) {
      if (schedule_.repeats()[r].begin == begin && std::find(entered.begin(), entered.end(), r) == entered.end())
        return r;
    }
    return {};
  }

  void range(std::uint32_t begin, std::uint32_t end, const std::vector<std::size_t>& entered) {
    for (std::uint32_t i = begin; i < end;) {
      if (const auto r = repeat_at(i, entered)) {
        repeat(*r, entered);
        i = schedule_.repeats()[*r].end;
      } else {
        UnfoldedOp op{i, {}};
        for (const OpRef ref : schedule_.after(schedule_.ops()[i])) {
          if (const std::uint32_t from = resolve(ref); from != kNothing) op.after.push_back(from);
        }
        list_.push_back(std::move(op));
        latest_[i] = static_cast<std::uint32_t>(list_.size() - 1);
        ++i;
      }
    }
  }

  void repeat(std::size_t index, std::vector<std::size_t> entered) {
    const Repeat& r = schedule_.repeats()[index];
    entered.push_back(index);
    std::vector<std::uint32_t> values(r.num_carried);
    const auto assign = [&](auto of) {
      for (std::uint32_t k = 0; k < r.num_carried; ++k)
        values[k] = resolve(of(schedule_.carried()[r.first_carried + k]));
      std::copy(values.begin(), values.end(), carried_.begin() + r.first_carried);
    };
    assign([](const Carried& c) { return c.first; });
    for (std::int64_t i = 0; i < r.count; ++i) {
      range(r.begin, r.end, entered);
      assign([](const Carried& c) { return c.next; });
    }
  }

  const Schedule& schedule_;
  std::vector<UnfoldedOp> list_;
  std::vector<std::uint32_t> latest_, carried_;
};

}  // namespace

std::vector<UnfoldedOp> unfold(const Schedule& schedule) { return Unfolder(schedule).run(); }

std::vector<double> longest_path(const Schedule& schedule, std::span<const UnfoldedOp> ops,
                                 std::span<const double> seconds) {
  std::vector<double> end(ops.size());
  std::array<double, kNumStreams> stream{};
  for (std::size_t i = 0; i < ops.size(); ++i) {
    const Op& op = schedule.ops()[ops[i].op];
    double start = stream[static_cast<std::size_t>(op.stream)];
    for (const std::uint32_t from : ops[i].after) start = std::max(start, end[from]);
    end[i] = stream[static_cast<std::size_t>(op.stream)] = start + seconds[op.work.index];
  }
  return end;
}

}  // namespace zeroplan::tests
