#include "cli/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "models/error.h"
#include "runtime/file_descriptor.h"

namespace zeroplan {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const fs::path& path, std::string_view expected, int code) {
  throw InputError(fmt::format("{}: expected {} ({})", path.string(), expected, std::strerror(code)));
}

/// Throws InputError; the file may be there in part then.
void write_file(const std::string& flag, const fs::path& path, const std::string& text, bool executable) {
  constexpr mode_t kReadable = 0666;
  constexpr mode_t kExecutable = 0777;
  FileDescriptor file(
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, executable ? kExecutable : kReadable));
  const std::string named = flag + ": " + path.string();
  if (!file.is_open()) fail(named, "a file that can be written", errno);
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t count = ::write(file.value(), text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(named, "room for the file", errno);
    done += static_cast<std::size_t>(count);
  }
  if (const int code = file.close(); code != 0) fail(named, "room for the file", code);
}

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(fs::symlink_status(path, ignored));
}

fs::path temporary(const fs::path& target) {
  return target.parent_path() / fmt::format(".{}.{}.tmp", target.filename().string(), ::getpid());
}

/// Where a file goes. Refuses a path that ends in a folder, before that is made.
std::string folder_of(const fs::path& path, std::string_view flag) {
  if (!path.has_filename()) throw InputError(fmt::format("{}: expected a file, got \"{}\"", flag, path.string()));
  return path.has_parent_path() ? path.parent_path().string() : ".";
}

}  // namespace

OutputFolder::OutputFolder(const std::string& path, bool overwrite, std::string_view flag)
    : path_(path), overwrite_(overwrite), flag_(flag) {
  try {
    make(path_);
  } catch (...) {
    remove_made();
    throw;
  }
}

void OutputFolder::make(const fs::path& wanted) {
  std::vector<fs::path> missing;
  std::error_code error;
  for (fs::path folder = wanted; !folder.empty() && !is_there(folder); folder = folder.parent_path()) {
    if (folder.has_filename()) missing.push_back(folder);
    if (folder == folder.parent_path()) break;
  }
  const std::string named = flag_ + ": " + wanted.string();
  for (; !missing.empty(); missing.pop_back()) {
    const bool made = fs::create_directory(missing.back(), error);
    if (error) fail(named, "a folder that can be made", error.value());
    if (made) made_.push_back(missing.back());  // "x/..", or made by another process since
  }
  if (!fs::is_directory(wanted, error)) fail(named, "a folder", error ? error.value() : ENOTDIR);
  if (::access(wanted.c_str(), W_OK | X_OK) != 0) fail(named, "a folder that can be written", errno);
}

void OutputFolder::remove_made() {
  std::error_code ignored;
  for (; !made_.empty(); made_.pop_back()) fs::remove(made_.back(), ignored);
}

OutputFolder::~OutputFolder() {
  if (!kept_) remove_made();
}

std::vector<std::string> OutputFolder::made() const { return {made_.begin(), made_.end()}; }

void refuse_existing_file(const fs::path& path, bool overwrite, std::string_view flag) {
  std::error_code ignored;
  const fs::file_status status = fs::symlink_status(path, ignored);
  // Renaming over /dev/null would take it away from the whole machine.
  if (fs::exists(status) && !fs::is_regular_file(status) && !fs::is_symlink(status)) {
    throw InputError(fmt::format("{}: {}: expected a regular file to overwrite", flag, path.string()));
  }
  if (!overwrite && fs::exists(status)) {
    throw InputError(fmt::format("{}: {} is there already; --force overwrites it", flag, path.string()));
  }
}

void OutputFolder::refuse_existing(const std::vector<std::string>& names) const {
  for (const std::string& name : names) refuse_existing_file(path_ / name, overwrite_, flag_);
}

void OutputFolder::write(const std::vector<ExportFile>& files) {
  std::vector<std::string> names;
  for (const ExportFile& file : files) names.push_back(file.name);
  refuse_existing(names);
  std::vector<fs::path> to_remove;
  std::error_code ignored;
  try {
    for (const ExportFile& file : files) {
      const fs::path target = path_ / file.name;
      if (target.parent_path() != path_) make(target.parent_path());
      to_remove.push_back(temporary(target));
      write_file(flag_, to_remove.back(), file.text, file.executable);
    }
    for (std::size_t i = 0; i < files.size(); ++i) {
      const fs::path target = path_ / files[i].name;
      const bool fresh = !is_there(target);
      std::error_code error;
      fs::rename(to_remove[i], target, error);
      if (error) fail(flag_ + ": " + target.string(), "a file that can be written", error.value());
      to_remove[i] = fresh ? target : fs::path();  // an overwritten file cannot be brought back
    }
  } catch (...) {
    for (const fs::path& path : to_remove) {
      if (!path.empty()) fs::remove(path, ignored);
    }
    throw;
  }
  kept_ = true;
}

OutputFile::OutputFile(const std::string& path, bool overwrite, std::string_view flag)
    : flag_(flag), name_(fs::path(path).filename().string()), folder_(folder_of(path, flag), overwrite, flag) {
  folder_.refuse_existing({name_});
}

void OutputFile::write(const std::string& text) { folder_.write({{name_, text, false}}); }

std::vector<std::string> OutputFile::notes() const {
  std::vector<std::string> notes;
  for (const std::string& made : folder_.made())
    notes.push_back(fmt::format("note: {}: made the folder {}", flag_, made));
  return notes;
}

void refuse_input_file(const std::string& output, const std::string& input, std::string_view what,
                       std::string_view flag) {
  std::error_code none;
  if (!fs::equivalent(output, input, none)) return;
  throw InputError(fmt::format("{}: {} is the {} itself; expected another file", flag, output, what));
}

}  // namespace zeroplan
