// The disk tier where the system refuses something, and beside other processes.

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <map>

#include "models/error.h"
#include "runtime/disk.h"
#include "tests/disk_support.h"

namespace zeroplan {
namespace {

using tests::all_notes;
using tests::Data;
using tests::engines;
using tests::HasText;
using tests::in_child;
using tests::options_in;
using tests::Player;
using tests::TemporaryDirectory;
using tests::uring_here;

TEST_CASE("Directories that are missing, no directory or read-only are the user's error") {
  const TemporaryDirectory directory;
  const std::vector<std::int64_t> sizes{4096};
  DiskOptions options = options_in(directory);
  options.directory = directory.path() + "/missing";
  CHECK_THROWS_AS(DiskFile(options, sizes), InputError);
  CHECK_THROWS_WITH(DiskFile(options, sizes), HasText("/missing") && HasText("No such file or directory"));
  options.directory = directory.path() + "/file";
  std::ofstream(options.directory) << "text";
  CHECK_THROWS_AS(DiskFile(options, sizes), InputError);
  CHECK_THROWS_WITH(DiskFile(options, sizes), HasText("/file") && HasText("expected a directory"));
  std::filesystem::create_directory(directory.path() + "/locked");
  std::filesystem::permissions(directory.path() + "/locked", std::filesystem::perms{0555});
  const std::string denied = in_child([&] {
    tests::become_nobody();
    options.directory = directory.path() + "/locked";
    try {
      DiskFile file(options, sizes);
    } catch (const InputError& e) {
      return std::string("InputError ") + e.what();
    }
    return std::string("no error");
  });
  CHECK_THAT(denied, HasText("InputError") && HasText("/locked") && HasText("Permission denied"));
}

TEST_CASE("Impossible options are the user's error") {
  const TemporaryDirectory directory;
  const std::vector<std::int64_t> sizes{4096};
  for (const int depth : {0, -1, 5000}) {
    DiskOptions options = options_in(directory);
    options.queue_depth = depth;
    CHECK_THROWS_AS(DiskFile(options, sizes), InputError);
  }
  for (const Bytes block : {0_B, 4095_B, 4097_B, 2_GiB, Bytes(4096.5), Bytes(-4096)}) {
    DiskOptions options = options_in(directory);
    options.block = block;
    CHECK_THROWS_AS(DiskFile(options, sizes), InputError);
  }
}

// What a DiskFile of this size says in a file system made for it, or "not allowed".
std::string on_new_disk(const std::string& directory, const char* type, const char* facts, std::int64_t size) {
  return in_child([&]() -> std::string {
    if (!tests::enter_namespaces(CLONE_NEWNS) || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount(type, directory.c_str(), type, 0, facts) != 0)
      return "not allowed";
    DiskOptions options;
    options.directory = directory;
    const std::vector<std::int64_t> sizes{size};
    DiskFile file(options, sizes);
    const Data data(static_cast<std::size_t>(size), std::byte{3});
    Data back(data.size());
    file.write(0, 0, data);
    file.read(0, 0, back);
    return (back == data ? "works\n" : "differs\n") + all_notes(file);
  });
}

TEST_CASE("A disk that is too small is a device error with path, bytes asked and bytes free") {
  const TemporaryDirectory directory;
  const std::string fits = on_new_disk(directory.path(), "tmpfs", "size=2m", 1'000'000);
  if (fits == "not allowed") {
    WARN("no right to mount a small file system: skipped");
    return;
  }
  CHECK_THAT(fits, HasText("works"));
  CHECK_THAT(on_new_disk(directory.path(), "tmpfs", "size=2m", 3'000'000),
             HasText(directory.path() + "/zeroplan-rank0-") && HasText("3002369 bytes") &&
                 HasText("No space left on device") && HasText("2097152 bytes (") && HasText("free"));
}

TEST_CASE("Where there is no direct I/O the page cache serves, and a note says so") {
  const TemporaryDirectory directory;
  const std::string told = on_new_disk(directory.path(), "ramfs", "", 1'000'001);
  if (told == "not allowed") {
    WARN("no right to mount a file system without direct I/O: skipped");
    return;
  }
  CHECK_THAT(told, HasText("works") && HasText(directory.path()) && HasText("through the page cache"));
}

TEST_CASE("A limit of the file size is told before and while writing") {
  const TemporaryDirectory directory;
  for (const DiskEngine engine : engines()) {
    const auto limited = [&](rlim_t before, rlim_t after, int depth) {
      return in_child([&] {
        std::signal(SIGXFSZ, SIG_IGN);
        rlimit limit{before, RLIM_INFINITY};
        if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return std::string("no limit");
        DiskOptions options = options_in(directory);
        options.engine = engine;
        options.block = 64_KiB;
        options.queue_depth = depth;
        const std::vector<std::int64_t> sizes{1'000'000};
        DiskFile file(options, sizes);
        limit.rlim_cur = after;
        if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return std::string("no limit");
        const Data data(1'000'000);
        file.write(0, 0, data);
        return std::string("written");
      });
    };
    // One block at a time meets the limit inside a block first, several may meet it behind.
    for (const int depth : {1, 16}) {
      CHECK(limited(RLIM_INFINITY, RLIM_INFINITY, depth) == "written");
      CHECK_THAT(limited(500'000, 500'000, depth),
                 HasText("1003521 bytes") && HasText("RLIMIT_FSIZE) is 500000 bytes"));
      CHECK_THAT(limited(RLIM_INFINITY, 500'000, depth),
                 HasText("zeroplan-rank0-") && HasText("File too large") && HasText("RLIMIT_FSIZE) is 500000 bytes"));
    }
  }
}

TEST_CASE("Where memory cannot be registered the transfers work without, and a note says so") {
  if (!uring_here()) return;
  const TemporaryDirectory directory;
  const std::string told = in_child([&] {
    rlimit limit{64 << 10, 64 << 10};
    if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return std::string("no limit");
    tests::become_nobody();
    Data data(1 << 20, std::byte{3}), back(1 << 20);
    DiskOptions options = options_in(directory);
    options.engine = DiskEngine::uring;
    options.fixed_memory = {data};
    const std::vector<std::int64_t> sizes{1 << 20};
    DiskFile file(options, sizes);
    file.write(0, 0, data);
    file.read(0, 0, back);
    return (back == data ? "works\n" : "differs\n") + all_notes(file);
  });
  CHECK_THAT(told, HasText("works\n") && HasText("not registered") && HasText("RLIMIT_MEMLOCK"));
  CHECK(told.find("not registered") == told.rfind("not registered"));  // once for both directions
}

// From here on io_uring_setup returns `code`.
void forbid_uring(int code) {
  sock_filter steps[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                         BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
                         BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(code)),
                         BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog program{static_cast<unsigned short>(std::size(steps)), steps};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
    throw std::runtime_error("no seccomp");
}

TEST_CASE("Where io_uring is forbidden or unknown threads do the work, unless it was asked for by name") {
  if (!uring_here()) return;
  const TemporaryDirectory directory;
  for (const auto& [code, text] : std::map<int, std::string>{{EPERM, "Operation not permitted"},
                                                             {ENOSYS, "Function not implemented"},
                                                             {ENOMEM, "Cannot allocate memory"}}) {
    for (const DiskEngine engine : {DiskEngine::automatic, DiskEngine::uring}) {
      const std::string told = in_child([&, c = code] {
        forbid_uring(c);
        DiskOptions options = options_in(directory);
        options.engine = engine;
        const std::vector<std::int64_t> sizes{100'000};
        DiskFile file(options, sizes);
        Player player(file, sizes, 0, 1, 5);
        const int wrong = player.play(5);
        return std::string(to_string(file.engine())) + " " + std::to_string(wrong) + "\n" + all_notes(file);
      });
      if (engine == DiskEngine::automatic) {
        CHECK_THAT(told, HasText("threads 0\n") && HasText(text) && HasText("threads read and write instead"));
      } else {
        CHECK_THAT(told, HasText("io_uring_setup: " + text) && HasText("zeroplan-rank0-"));
      }
    }
  }
}

// --- processes and names -----------------------------------------------------------------------------

TEST_CASE("Two processes in one directory do not meet, and neither leaves a file behind") {
  const TemporaryDirectory directory;
  const std::vector<std::int64_t> sizes{300'000};
  const auto play = [&](unsigned seed) {
    DiskFile file(options_in(directory), sizes);
    Player player(file, sizes, 0, 1, seed);
    return player.play(30);
  };
  const std::string result = in_child([&] {
    const pid_t second = fork();
    const int wrong = play(second == 0 ? 1 : 2);
    if (second == 0) _exit(wrong == 0 ? 0 : 1);
    int status = 0;
    waitpid(second, &status, 0);
    return std::to_string(wrong) + " " + std::to_string(status);
  });
  CHECK(result == "0 0");
  CHECK(directory.entries() == 0);
}

TEST_CASE("A killed process leaves no file behind") {
  const TemporaryDirectory directory;
  const std::string killed = in_child([&] {
    const std::vector<std::int64_t> sizes{300'000};
    DiskFile file(options_in(directory), sizes);
    file.write(0, 0, Data(300'000));
    std::raise(SIGKILL);
    return std::string();
  });
  CHECK(killed == "signal 9");
  CHECK(directory.entries() == 0);
}

TEST_CASE("A kept file stays with its contents, and is locked as long as it is in use") {
  const TemporaryDirectory directory;
  DiskOptions options = options_in(directory);
  options.keep = true;
  options.rank = 7;
  const std::vector<std::int64_t> sizes{5000, 300};
  std::string path;
  const auto lock = [&] {
    const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    REQUIRE(descriptor >= 0);
    const bool locked = flock(descriptor, LOCK_EX | LOCK_NB) == 0;
    close(descriptor);
    return locked;
  };
  {
    DiskFile file(options, sizes);
    path = file.path();
    CHECK_THAT(path, HasText(directory.path() + "/zeroplan-rank7-"));
    file.write(0, 0, Data(5000, std::byte{'a'}));
    file.write(1, 0, Data(300, std::byte{'b'}));
    CHECK_FALSE(lock());
    DiskFile other(options, sizes);
    CHECK(other.path() != path);
  }
  CHECK(lock());
  CHECK(directory.entries() == 2);
  std::ifstream in(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(in)), {});
  REQUIRE(text.size() == 12'289);
  CHECK(text.substr(0, 5000) == std::string(5000, 'a'));
  CHECK(text.substr(5000, 3192) == std::string(3192, '\0'));
  CHECK(text.substr(8192, 300) == std::string(300, 'b'));
}

TEST_CASE("A file that could not be made whole leaves no name, kept or not") {
  const TemporaryDirectory directory;
  for (const bool keep : {false, true}) {
    DiskOptions options = options_in(directory);
    options.keep = keep;
    const std::vector<std::int64_t> sizes{std::int64_t{1} << 60};
    CHECK_THROWS_AS(DiskFile(options, sizes), DeviceError);
    CHECK(directory.entries() == 0);
  }
}

}  // namespace
}  // namespace zeroplan
