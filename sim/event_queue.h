#pragma once
// Pending events of a simulation in time order. Amortised constant time whatever the number pending: a ladder queue
// (Tang, Goh and Thng, ACM TOMACS 15(3), 2005): far events lie unsorted, and are split into narrower and narrower
// buckets only when their time comes; the nearest bucket is sorted.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace zeroplan {

struct Event {
  double time = 0;
  std::uint32_t id = 0;     // orders events of equal times
  std::uint32_t stamp = 0;  // the caller's; not looked at
};

class EventQueue {
 public:
  bool empty() const { return size_ == 0; }
  std::size_t size() const { return size_; }

  /// Throws std::logic_error on a time that is not finite or lies before the last event popped.
  void push(Event event);
  /// The earliest; of equal times the lowest id. Precondition: not empty.
  Event pop();
  /// Time of the next event. Precondition: not empty.
  double next_time();
  /// Forgets all events and the time reached; keeps the memory.
  void clear();

 private:
  /// Equal buckets over a range of time. Those before `current` are taken: done, in front_, or split into the next
  /// rung.
  struct Rung {
    double start = 0;
    double per_width = 0;  // 1 / width of a bucket
    std::size_t current = 0, num_buckets = 0, num_events = 0;
    std::vector<std::vector<Event>> buckets;

    std::size_t index(double time) const;
  };

  bool side_first() const;
  void refill();
  void spread(const std::vector<Event>& events, double least, double most);
  void open(std::vector<Event>& events);
  void sort_to_front(std::vector<Event>& events);

  std::vector<Event> front_;  // sorted; from head_ on
  std::size_t head_ = 0;
  std::vector<Event> side_;  // binary heap of events that came too late for front_
  std::vector<Rung> rungs_;  // widest first; depth_ of them are in use
  std::size_t depth_ = 0;
  std::vector<Event> far_;  // beyond the widest rung
  double far_from_ = 0;     // far_ begins after it
  std::vector<Event> scratch_;
  double now_ = 0;
  std::size_t size_ = 0;
};

}  // namespace zeroplan
