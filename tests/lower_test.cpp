// Laws that every lowered schedule keeps, on random (model, plan).

#include <array>
#include <map>
#include <set>

#include "models/lower.h"
#include "models/overloaded.h"
#include "tests/catch.h"
#include "tests/random_plan.h"
#include "tests/unfold.h"

namespace zeroplan::tests {
namespace {

// --- one text for what a work is, to compare works of two schedules ----------------------------------

using Numbers = std::vector<double>;

Numbers numbers_of(const Work& work) {
  const auto d = [](auto v) { return static_cast<double>(v); };
  Numbers n{d(work.index())};
  std::visit(overloaded{
                 [](const Alloc&) {},
                 [](const Free&) {},
                 [&](const Compute& c) {
                   for (double v : {d(c.kind), d(c.graph_op), d(c.pass), d(c.on_host), d(c.kernel.index())})
                     n.push_back(v);
                   std::visit(overloaded{
                                  [&](const Gemm& g) {
                                    for (double v : {d(g.m), d(g.n), d(g.k), d(g.groups), d(g.type), d(g.fp32_output),
                                                     d(g.accumulate)}) {
                                      n.push_back(v);
                                    }
                                  },
                                  [&](const AttentionWork& a) {
                                    for (double v :
                                         {d(a.shape.heads), d(a.shape.kv_heads), d(a.shape.qk_dim), d(a.shape.window),
                                          d(a.tokens.batch), d(a.tokens.seq_len), d(a.type), d(a.backward)}) {
                                      n.push_back(v);
                                    }
                                  },
                                  [&](const Pointwise& p) { n.push_back(p.traffic.base()); },
                              },
                              c.kernel);
                 },
                 [&](const Collective& c) {
                   for (double v : {d(c.kind), d(c.group), d(c.elements), d(c.padded), d(c.type)}) n.push_back(v);
                 },
                 [&](const Copy& c) {
                   for (double v : {d(c.from), d(c.to), c.bytes.base()}) n.push_back(v);
                 },
                 [&](const AdamStep& a) {
                   for (double v : {d(a.parameters), d(a.where), a.traffic.base()}) n.push_back(v);
                 },
                 [](const Join&) {},
             },
             work);
  return n;
}

Numbers numbers_of(const Buffer& b) {
  const auto d = [](auto v) { return static_cast<double>(v); };
  return {d(b.role), d(b.memory), d(b.owner), d(b.lifetime), d(b.value), b.size.base()};
}

/// Throws with the first op that differs. Which layer an op belongs to is the one thing that folding gives up.
void require_same(const Schedule& flat, const Schedule& folded) {
  const auto unfolded = unfold(folded);
  const auto fail = [](std::size_t i, const std::string& what) {
    throw std::runtime_error("op " + std::to_string(i) + " of the unfolded schedule differs in " + what);
  };
  std::vector<Numbers> flat_works, folded_works;
  for (const Work& w : flat.works()) flat_works.push_back(numbers_of(w));
  for (const Work& w : folded.works()) folded_works.push_back(numbers_of(w));
  if (unfolded.size() != flat.ops().size()) fail(std::min(unfolded.size(), flat.ops().size()), "the number of ops");
  for (std::size_t i = 0; i < unfolded.size(); ++i) {
    const Op& a = flat.ops()[i];
    const Op& b = folded.ops()[unfolded[i].op];
    if (a.stream != b.stream) fail(i, "its stream");
    if (a.phase != b.phase) fail(i, "its phase");
    if (flat_works[a.work.index] != folded_works[b.work.index]) fail(i, "its work");
    std::set<std::uint32_t> edges, other(unfolded[i].after.begin(), unfolded[i].after.end());
    for (const OpRef ref : flat.after(a)) edges.insert(ref.index());
    if (edges != other) fail(i, "its edges");
    const auto x = flat.operands(a), y = folded.operands(b);
    if (x.size() != y.size()) fail(i, "the number of operands");
    for (std::size_t k = 0; k < x.size(); ++k) {
      if (x[k].access != y[k].access) fail(i, "an access");
      if (numbers_of(flat.buffer(x[k].buffer)) != numbers_of(folded.buffer(y[k].buffer))) fail(i, "a buffer");
    }
  }
}

// --- bytes as ops claim them against bytes of the buffers they touch ---------------------------------

int group_size(const Plan& plan, Group group) {
  switch (group) {
    case Group::all:
      return plan.ranks;
    case Group::shard:
      return plan.shard_ranks;
    case Group::replica:
      return plan.replicas();
  }
  return 0;
}

/// Whole equals message; every rank sends ranks - 1 times its part and receives what it lacks.
void check_collective(const Schedule& s, const Op& op, const Collective& c, const Plan& plan) {
  const auto operands = s.operands(op);
  const std::int64_t n = group_size(plan, c.group);
  const auto require = [](bool ok, const char* what) {
    if (!ok) throw std::runtime_error(what);
  };
  require(n > 1, "a collective of one rank");
  require(c.elements <= c.padded, "fewer elements sent than there are");
  if (c.elements == 1) return;  // the global norm: a scalar
  Bytes whole, part;
  for (const Operand& o : operands) {
    const Bytes size = s.buffer(o.buffer).size;
    if (size > whole)
      std::swap(whole, part), whole = size;
    else
      part = size;
  }
  if (operands.size() == 1) part = Bytes(whole.base() / static_cast<double>(n));
  // Below stage 2 the replicas sum a rank's part inside the whole gradient.
  const bool inside = c.kind == CollectiveKind::all_reduce && c.group == Group::replica;
  const bool rank_part = inside && static_cast<double>(plan.shard_ranks) * c.message() == whole;
  require(whole == c.message() || rank_part, "message and buffer differ");
  if (c.kind != CollectiveKind::all_reduce) {
    require(static_cast<double>(n) * part == whole, "shards do not make the whole");
    const double sent = static_cast<double>(n) * static_cast<double>(n - 1) * part.base();
    const double received = static_cast<double>(n) * (whole - part).base();
    require(sent == received, "bytes sent are not bytes received");
  }
}

/// Both sides hold what is copied: exactly, or as the rank's part of a whole block, or in a slot that fits every block.
void check_copy(const Schedule& s, const Op& op, const Copy& c, const Plan& plan) {
  Bytes read, written;
  bool read_slot = false, write_slot = false;
  for (const Operand& o : s.operands(op)) {
    const Buffer& b = s.buffer(o.buffer);
    const bool from = o.access == Access::read;
    const Memory side = from ? c.from : c.to;
    const bool same = b.memory == side || (side == Memory::pinned && b.memory == Memory::dram);
    if (!same) throw std::runtime_error("a copy touches a buffer of another memory");
    (from ? read : written) += b.size;
    (from ? read_slot : write_slot) = b.block < 0;
  }
  const auto holds = [&](Bytes size, bool slot) {
    if (slot) return size >= c.bytes;
    return size == c.bytes || size == static_cast<double>(plan.shard_ranks) * c.bytes;
  };
  if (!holds(read, read_slot) || !holds(written, write_slot)) {
    throw std::runtime_error("a copy's bytes are not its buffers'");
  }
}

void check_bytes(const Schedule& s, const Plan& plan) {
  Bytes states_read, states_written;
  for (const Op& op : s.ops()) {
    const Work& work = s.work(op);
    if (const auto* c = std::get_if<Collective>(&work)) check_collective(s, op, *c, plan);
    if (const auto* c = std::get_if<Copy>(&work)) {
      check_copy(s, op, *c, plan);
      if (op.stream == Stream::nvme_read && s.buffer(s.operands(op)[0].buffer).role == BufferRole::state_slot)
        states_read += c->bytes;
      if (op.stream == Stream::nvme_write && s.buffer(s.operands(op)[0].buffer).role == BufferRole::state_slot)
        states_written += c->bytes;
    }
  }
  if (states_read != states_written) throw std::runtime_error("states read from disk are not written back");
}

/// Every parameter is updated once, by one Adam.
void check_updates(const Schedule& s, const ModelSpec& model, const Plan& plan) {
  std::int64_t updated = 0, expected = 0;
  for (const Op& op : s.ops()) {
    if (const auto* adam = std::get_if<AdamStep>(&s.work(op))) updated += adam->parameters;
  }
  for (const int kind : model.sequence) {
    expected +=
        flat_layout(model.kinds[static_cast<std::size_t>(kind)], plan.precision.weights, plan.shard_ranks).shard;
  }
  if (updated != expected) throw std::runtime_error("Adam updates another number of parameters than the rank's part");
}

/// Nothing reads a step buffer that nobody has written since its allocation.
void check_written_before_read(const Schedule& s) {
  std::vector<bool> written(s.buffers().size(), false);
  for (const Op& op : s.ops()) {
    const bool alloc = std::holds_alternative<Alloc>(s.work(op)), free = std::holds_alternative<Free>(s.work(op));
    for (const Operand& o : s.operands(op)) {
      const bool step = s.buffer(o.buffer).lifetime == Lifetime::step;
      if (step && !alloc && !free && o.access == Access::read && !written[o.buffer.index]) {
        throw std::runtime_error("a buffer is read before it is written");
      }
      if (alloc)
        written[o.buffer.index] = false;
      else if (o.access != Access::read)
        written[o.buffer.index] = true;
    }
  }
}

void check_multiplicities(const Schedule& flat, const Schedule& folded) {
  std::int64_t sum = 0;
  for (const std::int64_t times : folded.multiplicities()) sum += times;
  if (sum != static_cast<std::int64_t>(flat.ops().size()))
    throw std::runtime_error("multiplicities do not sum to the ops");
}

void check_scenario(const Scenario& scenario) {
  Lowering lowering(scenario.model);
  const Schedule flat = lowering.zeroplan(scenario.plan, Folding::none);
  const Schedule folded = lowering.zeroplan(scenario.plan, Folding::layers);
  validate(flat, scenario.model);
  check_written_before_read(flat);
  check_bytes(flat, scenario.plan);
  check_updates(flat, scenario.model, scenario.plan);
  check_multiplicities(flat, folded);
  require_same(flat, folded);
  require_same(flat, lowering.zeroplan(scenario.plan, Folding::micro_steps));
}

/// One failure of each kind is shown, with the number of cases that have it.
void check_many(std::uint64_t seed, std::int64_t cases) {
  Random random(seed);
  std::map<std::string, std::pair<int, std::string>> failures;  // first words -> count, first case
  for (std::int64_t i = 0; i < cases; ++i) {
    const Scenario scenario = random_scenario(random);
    try {
      check_scenario(scenario);
    } catch (const std::exception& e) {
      auto& [count, first] = failures[std::string(e.what()).substr(0, 40)];
      if (count++ == 0) first = std::string(e.what()) + "\n  " + name_of(scenario);
    }
  }
  for (const auto& [key, failure] : failures) {
    INFO(failure.first << " of " << cases << " cases, the first: " << failure.second);
    CHECK(key.empty());
  }
  CHECK(failures.empty());
}

}  // namespace

TEST_CASE("The global norm is summed once over each copy of the states") {
  Random random(3);
  const ModelSpec model = random_model(random);
  const auto groups = [&](int shard_ranks) {
    Plan p;
    p.ranks = 8;
    p.shard_ranks = shard_ranks;
    p.zero_stage = 2;
    p.seq_len = 128;
    p.reduce_each = ReduceEach::micro_step;
    p.optimizer = p.parameters = Placement::all(Tier::hbm, static_cast<int>(model.sequence.size()));
    check_plan(p, model, "test");
    const Schedule schedule = lower(model, p, Folding::none);
    std::vector<Group> found;
    for (const Op& op : schedule.ops()) {
      const auto* c = std::get_if<Collective>(&schedule.work(op));
      if (c != nullptr && c->elements == 1) found.push_back(c->group);
    }
    return found;
  };
  CHECK(groups(8) == std::vector{Group::shard});
  CHECK(groups(4) == std::vector{Group::shard});
  CHECK(groups(1).empty());
}

TEST_CASE("2000 random schedules validate and fold exactly and move the bytes they claim") { check_many(1, 2000); }
TEST_CASE("100000 random schedules validate and fold exactly and move the bytes they claim", "[.slow]") {
  check_many(2, slow_cases(100'000));
}

}  // namespace zeroplan::tests
