// A job whose ranks are threads of this process.

#include <fmt/format.h>

#include <exception>
#include <string_view>
#include <system_error>
#include <thread>

#include "models/error.h"
#include "runtime/thread_communicator.h"
#include "runtime/trainer.h"

namespace zeroplan {
namespace {

/// The error that began it: peers' errors carry its text. A wrong input says more than the failures that follow it.
std::exception_ptr first_cause(const std::vector<std::exception_ptr>& errors) {
  std::exception_ptr cause;
  std::size_t shortest = 0;
  bool input = false;
  for (const std::exception_ptr& error : errors) {
    if (!error) continue;
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& e) {
      const bool is_input = dynamic_cast<const InputError*>(&e) != nullptr;
      const std::size_t length = std::string_view(e.what()).size();
      if (cause && (input > is_input || (input == is_input && length >= shortest))) continue;
      cause = error;
      shortest = length;
      input = is_input;
    }
  }
  return cause;
}

}  // namespace

TrainResult train_threads(const PlanFile& file, const TrainOptions& options,
                          const std::function<void(const StepReport&)>& on_step) {
  auto worlds = make_thread_worlds(file.plan.ranks, kTrainingWaitLimit);
  TrainResult result;
  std::vector<std::exception_ptr> errors(worlds.size());
  const auto rank = [&](World& world) {
    try {
      TrainResult mine = train(file, world, options, on_step);
      if (world.rank() == 0) result = std::move(mine);
    } catch (...) {
      errors[static_cast<std::size_t>(world.rank())] = std::current_exception();
    }
  };
  std::vector<std::jthread> threads;
  try {
    for (auto& world : worlds) threads.emplace_back([&rank, w = world.get()] { rank(*w); });
  } catch (const std::system_error& e) {
    worlds[threads.size()]->abort("no thread for it");  // or those that run would wait for the rest
    throw DeviceError(fmt::format("no thread for rank {} of {}: {}", threads.size(), worlds.size(), e.what()));
  }
  threads.clear();
  if (const std::exception_ptr cause = first_cause(errors)) std::rethrow_exception(cause);
  return result;
}

}  // namespace zeroplan
