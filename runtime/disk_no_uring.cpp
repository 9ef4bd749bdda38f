// Built where liburing is missing: DiskEngine::automatic goes on with threads, and says so.

#include "models/error.h"
#include "runtime/disk_queue.h"

namespace zeroplan {

std::unique_ptr<DiskBackend> make_uring_backend(const DiskTarget&) {
  throw DeviceError("io_uring: this program was built without liburing");
}

}  // namespace zeroplan
