#include "sim/event_queue.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>

namespace zeroplan {
namespace {

/// Sorted at once; more events are split first.
constexpr std::size_t kSortedAtOnce = 48;
/// More than this in the heap beside the front become a rung of their own.
constexpr std::size_t kMostAside = 64;
constexpr std::size_t kEventsPerBucket = 8, kLeastBuckets = 8, kMostBuckets = 1024;
/// A range that is still crowded after so many splits (all at one time and one far away, again and again) is sorted.
constexpr std::size_t kMostRungs = 8;
constexpr double kNever = std::numeric_limits<double>::infinity();

bool before(const Event& a, const Event& b) { return a.time < b.time || (a.time == b.time && a.id < b.id); }
bool after(const Event& a, const Event& b) { return before(b, a); }

void insertion_sort(std::vector<Event>& events) {
  for (std::size_t i = 1; i < events.size(); ++i) {
    const Event event = events[i];
    std::size_t k = i;
    for (; k > 0 && before(event, events[k - 1]); --k) events[k] = events[k - 1];
    events[k] = event;
  }
}

}  // namespace

// Never falls as time rises, so equal times share a bucket and buckets are in order, whatever the rounding.
std::size_t EventQueue::Rung::index(double time) const {
  const double position = (time - start) * per_width;
  if (!(position > 0)) return 0;
  return position >= static_cast<double>(num_buckets) ? num_buckets - 1 : static_cast<std::size_t>(position);
}

void EventQueue::push(Event event) {
  if (!(event.time >= now_) || event.time == kNever)
    throw std::logic_error("event queue: an event in the past or at no time");
  ++size_;
  if (event.time > far_from_) {
    far_.push_back(event);
    return;
  }
  for (std::size_t k = 0; k < depth_; ++k) {
    Rung& rung = rungs_[k];
    const std::size_t at = rung.index(event.time);
    if (at >= rung.current) {
      rung.buckets[at].push_back(event);
      ++rung.num_events;
      return;
    }
  }
  side_.push_back(event);
  std::push_heap(side_.begin(), side_.end(), after);
  // A long front (many events at one time) stays as it is, or each few pushes would sort it again.
  if (side_.size() <= kMostAside || front_.size() - head_ > kMostAside || depth_ >= kMostRungs) return;
  scratch_.assign(front_.begin() + static_cast<std::ptrdiff_t>(head_), front_.end());
  scratch_.insert(scratch_.end(), side_.begin(), side_.end());
  front_.clear();
  side_.clear();
  head_ = 0;
  open(scratch_);
}

bool EventQueue::side_first() const {
  return !side_.empty() && (head_ == front_.size() || before(side_.front(), front_[head_]));
}

double EventQueue::next_time() {
  if (head_ == front_.size() && side_.empty()) refill();
  return side_first() ? side_.front().time : front_[head_].time;
}

Event EventQueue::pop() {
  if (head_ == front_.size() && side_.empty()) refill();
  Event event;
  if (side_first()) {
    std::pop_heap(side_.begin(), side_.end(), after);
    event = side_.back();
    side_.pop_back();
  } else {
    event = front_[head_++];
  }
  --size_;
  now_ = event.time;
  return event;
}

void EventQueue::clear() {
  front_.clear();
  side_.clear();
  far_.clear();
  for (std::size_t k = 0; k < depth_; ++k) {
    for (auto& bucket : rungs_[k].buckets) bucket.clear();
  }
  head_ = depth_ = size_ = 0;
  now_ = far_from_ = 0;
}

/// Moves the next bucket to the front.
void EventQueue::refill() {
  while (head_ == front_.size()) {
    while (depth_ > 0 && rungs_[depth_ - 1].num_events == 0) --depth_;
    if (depth_ == 0) {
      scratch_.swap(far_);
      far_.clear();
      open(scratch_);
      continue;
    }
    Rung& rung = rungs_[depth_ - 1];
    while (rung.buckets[rung.current].empty()) ++rung.current;
    std::vector<Event>& bucket = rung.buckets[rung.current++];
    rung.num_events -= bucket.size();
    if (bucket.size() <= kSortedAtOnce) {
      sort_to_front(bucket);
    } else {
      scratch_.swap(bucket);
      open(scratch_);
    }
  }
}

/// Splits events that come before everything in the rungs in use, or sorts them. Leaves `events` empty.
void EventQueue::open(std::vector<Event>& events) {
  double least = events.front().time, most = least;
  for (const Event& event : events) {
    least = std::min(least, event.time);
    most = std::max(most, event.time);
  }
  if (depth_ == 0) far_from_ = most;
  const bool one_time = !(most > least) || !((static_cast<double>(kMostBuckets) / (most - least)) < kNever);
  if (one_time || events.size() <= kSortedAtOnce || depth_ >= kMostRungs) {
    sort_to_front(events);
  } else {
    spread(events, least, most);
    events.clear();
  }
}

void EventQueue::spread(const std::vector<Event>& events, double least, double most) {
  if (rungs_.size() <= depth_) rungs_.resize(depth_ + 1);
  Rung& rung = rungs_[depth_++];
  const std::size_t wanted = std::bit_ceil(events.size() / kEventsPerBucket);
  rung.num_buckets = std::clamp(wanted, kLeastBuckets, kMostBuckets);
  if (rung.buckets.size() < rung.num_buckets) rung.buckets.resize(rung.num_buckets);
  rung.start = least;
  rung.per_width = static_cast<double>(rung.num_buckets) / (most - least);
  rung.current = 0;
  rung.num_events = events.size();
  for (const Event& event : events) rung.buckets[rung.index(event.time)].push_back(event);
}

void EventQueue::sort_to_front(std::vector<Event>& events) {
  front_.swap(events);
  events.clear();
  head_ = 0;
  if (std::is_sorted(front_.begin(), front_.end(), before)) return;
  if (front_.size() <= kSortedAtOnce) {
    insertion_sort(front_);
  } else {
    std::sort(front_.begin(), front_.end(), before);
  }
}

}  // namespace zeroplan
