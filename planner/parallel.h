#pragma once
// Independent tasks on the cores that are there.

#include <cstddef>
#include <functional>

namespace zeroplan {

/// Calls task(0) .. task(count - 1), each once, several at a time in any order; a task may not touch what another
/// writes. What the first (by number) of those that threw has thrown is thrown when all have ended.
void run_parallel(std::size_t count, const std::function<void(std::size_t)>& task);

}  // namespace zeroplan
