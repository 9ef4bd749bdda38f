#pragma once
// A folder of a test's own, gone when the test ends. In memory where there is such a file system: syncing a busy disk
// takes most of a test's time. TMPDIR, when set, is taken instead.

#include <stdlib.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>

namespace zeroplan::tests {

class TemporaryFolder {
 public:
  TemporaryFolder() : path_((root() / "zeroplan-test-XXXXXX").string()) {
    if (::mkdtemp(path_.data()) == nullptr) throw std::runtime_error("cannot make " + path_);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::filesystem::path path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path() / name; }

 private:
  static std::filesystem::path root() {
    const std::filesystem::path memory = "/dev/shm";
    if (std::getenv("TMPDIR") == nullptr && ::access(memory.c_str(), W_OK | X_OK) == 0) return memory;
    return std::filesystem::temp_directory_path();
  }

  std::string path_;
};

inline std::string bytes_of_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path.string());
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

inline void write_bytes(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << bytes;
  if (!out.flush()) throw std::runtime_error("cannot write " + path.string());
}

}  // namespace zeroplan::tests
