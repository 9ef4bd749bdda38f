#pragma once
// A test in a process of its own: for what cannot be undone (limits, users, mounts, signals). No Catch2 macros inside.

#include <sched.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>

namespace zeroplan::tests {

/// What `body` returned, or the text of its exception; "exit N" or "signal N" if it ended otherwise. After 240 s the
/// child ends by SIGALRM, a guard against hangs. The child writes nothing on the terminal.
inline std::string in_child(const std::function<std::string()>& body) {
  int ends[2];
  if (pipe(ends) != 0) throw std::runtime_error("pipe");
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("fork");
  if (child == 0) {
    close(ends[0]);
    alarm(240);
    // Catch2's handlers would report the parent's test as failed.
    for (const int number : {SIGSEGV, SIGBUS, SIGABRT, SIGILL, SIGFPE, SIGTERM}) std::signal(number, SIG_DFL);
    if (std::freopen("/dev/null", "w", stderr) == nullptr) _exit(99);
    std::string text;
    try {
      text = body();
    } catch (const std::exception& e) {
      text = e.what();
    }
    const bool sent = write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size());
    _exit(sent ? 0 : 98);
  }
  close(ends[1]);
  std::string text;
  char part[4096];
  for (ssize_t count; (count = read(ends[0], part, sizeof part)) > 0;)
    text.append(part, static_cast<std::size_t>(count));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status)) return "signal " + std::to_string(WTERMSIG(status));
  if (WEXITSTATUS(status) != 0) return "exit " + std::to_string(WEXITSTATUS(status));
  return text;
}

/// A new empty directory that everybody may write to, removed with what is in it.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string path = (std::filesystem::temp_directory_path() / "zeroplan-test-XXXXXX").string();
    if (mkdtemp(path.data()) == nullptr) throw std::runtime_error("mkdtemp " + path);
    path_ = path;
    std::filesystem::permissions(path_, std::filesystem::perms::all);
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::string& path() const { return path_; }
  std::size_t entries() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(path_), {}));
  }

 private:
  std::string path_;
};

/// Gives up root's rights, if it has them: limits and permissions then hold.
inline void become_nobody() {
  constexpr uid_t kNobody = 65534;
  if (geteuid() == 0 && (setresgid(kNobody, kNobody, kNobody) != 0 || setresuid(kNobody, kNobody, kNobody) != 0))
    throw std::runtime_error("setresuid");
}

/// Enters new namespaces (CLONE_NEWNS, CLONE_NEWNET) as root; without root's rights as root of a user namespace. False
/// where that is not allowed.
inline bool enter_namespaces(int flags) {
  const uid_t user = geteuid();
  const gid_t group = getegid();
  if (user == 0) return unshare(flags) == 0;
  if (unshare(flags | CLONE_NEWUSER) != 0) return false;
  const auto write_to = [](const char* path, const std::string& text) {
    std::ofstream out(path);
    return static_cast<bool>(out << text << std::flush);
  };
  return write_to("/proc/self/setgroups", "deny") &&
         write_to("/proc/self/uid_map", "0 " + std::to_string(user) + " 1") &&
         write_to("/proc/self/gid_map", "0 " + std::to_string(group) + " 1");
}

}  // namespace zeroplan::tests
