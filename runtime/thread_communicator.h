#pragma once
// Ranks that are threads of this process. Members meet, read each other's tensors in place, and part: a gather is one
// copy, a sum reads every tensor once.

#include <chrono>
#include <memory>
#include <vector>

#include "runtime/communicator.h"

namespace zeroplan {

/// One World for each of `ranks` >= 1 ranks; world r belongs to the thread(s) of rank r. A call that waits longer than
/// `wait_limit` for a member ends the job. A World or communicator that is destroyed counts as its rank leaving: calls
/// that need that rank fail, others go on.
std::vector<std::unique_ptr<World>> make_thread_worlds(int ranks,
                                                       std::chrono::milliseconds wait_limit = kDefaultWaitLimit);

}  // namespace zeroplan
