#include "models/json_reader.h"

#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <limits>
#include <random>
#include <thread>

#include "models/text_file.h"
#include "tests/catch.h"

using namespace zeroplan;
using namespace zeroplan::tests;
namespace fs = std::filesystem;

namespace {

JsonDocument parse(std::string_view text, JsonSyntax syntax = JsonSyntax::strict) {
  return JsonDocument::parse(text, "e.json", syntax);
}

/// The message of the InputError that parsing or reading `document` throws.
template <class Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

std::string parse_error(std::string_view text) {
  return message_of([&] { parse(text); });
}

/// A folder of its own that disappears with the test.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (fs::temp_directory_path() / "zeroplan-test-XXXXXX").string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  fs::path write(const std::string& name, std::string_view text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
    return path_ / name;
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

constexpr std::string_view kMachine = R"({
  "schema": 1,
  "name": "two \"A100\" é",
  "gpu": {
    "memory": "80 GiB",
    "memory_bandwidth": "2039 GB/s",
    "peak": "312 TFLOPS",
    "latency": "3.4 us",
    "ids": [0, 1, -2, 3e1, 4.5],
    "a/b~c": [[true, false], null]
  }
}
)";

constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

}  // namespace

TEST_CASE("Values have the kind, the line and the pointer of the text") {
  const JsonDocument document = parse(kMachine);
  const JsonValue& root = document.root();
  CHECK(root.is_object());
  CHECK(root.line() == 1);
  CHECK(root.pointer().empty());
  CHECK(root.file() == "e.json");
  CHECK(root.at("schema").as_int(1, 1) == 1);
  CHECK(root.at("schema").line() == 2);
  CHECK(root.at("name").as_string() == "two \"A100\" é");
  const JsonValue& gpu = root.at("gpu");
  CHECK(gpu.line() == 4);
  CHECK(gpu.at("memory").as_bytes() == 80_GiB);
  CHECK(gpu.at("memory_bandwidth").as_rate() == 2039_GBps);
  CHECK(gpu.at("memory_bandwidth").pointer() == "/gpu/memory_bandwidth");
  CHECK(gpu.at("peak").as_flop_rate() == 312.0_TFLOPS);
  CHECK(gpu.at("latency").as_seconds() == parse_seconds("3.4us", "t"));
  CHECK(gpu.at("ids").items()[2].as_int(-2, -2) == -2);
  CHECK(gpu.at("ids").items()[2].pointer() == "/gpu/ids/2");
  CHECK(gpu.at("a/b~c").items()[0].items()[1].pointer() == "/gpu/a~1b~0c/0/1");
  CHECK(gpu.at("a/b~c").items()[1].is_null());
  CHECK(gpu.find("absent") == nullptr);
  REQUIRE(root.members().size() == 3);
  CHECK(root.members()[1].first == "name");
}

TEST_CASE("A document can be moved: its values stay where they are") {
  JsonDocument document = parse(kMachine);
  const JsonValue& memory = document.root().at("gpu").at("memory");
  const JsonDocument moved = std::move(document);
  CHECK(&moved.root().at("gpu").at("memory") == &memory);
  CHECK(memory.pointer() == "/gpu/memory");
  CHECK(memory.file() == "e.json");
}

TEST_CASE("A value has the line on which it starts, whatever ends it") {
  const std::vector<std::string> ends = {"\n", "\r\n", " \n", "\n\n", "/* */\n", "// x\n"};
  for (const std::string& end : ends) {
    for (const std::string value : {"1", "-1.5e3", "true", "null", "\"x\"", "[]", "{}"}) {
      const JsonDocument document = parse("[\n" + value + end + ",7]", JsonSyntax::comments);
      INFO(value << end);
      CHECK(document.root().items()[0].line() == 2);
      const int newlines = static_cast<int>(std::count(end.begin(), end.end(), '\n'));
      CHECK(document.root().items()[1].line() == 2 + newlines);
    }
  }
  CHECK(parse("\n\n42").root().line() == 3);
  CHECK(parse("\n\n42\n\n").root().line() == 3);
  CHECK(parse("\xEF\xBB\xBF{\n\"a\": 1}").root().at("a").line() == 2);
}

TEST_CASE("Syntax errors name the file and the line, on one line") {
  CHECK_THAT(parse_error(""), HasText("e.json:1: ") && HasText("empty"));
  CHECK_THAT(parse_error(" \n\t\n"), HasText("e.json:1: ") && HasText("empty"));
  CHECK_THAT(parse_error("{\n\"a\": 1,\n"), HasText("e.json:2: ") && HasText("end of input"));
  CHECK_THAT(parse_error("{\n\"a\": [1,\n2"), HasText("e.json:3: ") && HasText("end of input"));
  CHECK_THAT(parse_error("{\n\"a\": 1\n}\nx"), HasText("e.json:4: "));
  CHECK_THAT(parse_error("{\n\"a\" 1\n}"), HasText("e.json:2: "));
  CHECK_THAT(parse_error("[\n1\n2]"), HasText("e.json:3: "));
  CHECK_THAT(parse_error("[\"a\nb\"]"), HasText("e.json:1: "));
  CHECK_THAT(parse_error("[\n\"\xff\"]"), HasText("e.json:2: ") && HasText("UTF-8"));
  CHECK_THAT(parse_error("// no\n{}"), HasText("e.json:1: "));
  for (const std::string text : {"[NaN]", "[Infinity]", "[1,]", "{'a': 1}", "[01]", "[+1]", "[.5]", "[1.]", "{} {}"}) {
    INFO(text);
    CHECK_THAT(parse_error(text), HasText("e.json:1: "));
  }
  const std::string long_token = parse_error("[\"" + std::string(100'000, 'x') + "\n\"]");
  CHECK(long_token.size() < 400);
  CHECK(long_token.find('\n') == std::string::npos);
}

TEST_CASE("Numbers that no 64-bit type holds are refused by name") {
  CHECK_THAT(parse_error("[\n1e400]"), HasText("e.json:2: ") && HasText("1e400"));
  CHECK_THAT(parse_error("[-1e400]"), HasText("-1e400"));
  CHECK_THAT(parse_error("[9223372036854775808]"), HasText("e.json:1: ") && HasText("9223372036854775808"));
  CHECK_THAT(parse_error("[-9223372036854775809]"), HasText("-9223372036854775809"));
  CHECK_THAT(parse_error("[123456789012345678901234567890]"), HasText("123456789012345678901234567890"));
  CHECK(parse("9223372036854775807").root().as_int(0, kMax) == kMax);
  CHECK(parse("-9223372036854775808").root().as_int(kMin, 0) == kMin);
}

TEST_CASE("A key given twice is refused where it is repeated, in small and in large objects") {
  CHECK_THAT(parse_error("{\"a\": 1,\n\"b\": 2,\n\"a\": 3}"), HasText("e.json:3: ") && HasText("\"a\""));
  CHECK(parse("{\"a\": {\"a\": 1}, \"b\": {\"a\": 1}}").root().members().size() == 2);
  std::string text = "{";
  for (int i = 0; i < 50'000; ++i) text += "\"k" + std::to_string(i) + "\": 0,\n";
  CHECK(parse(text + "\"last\": 0}").root().members().size() == 50'001);
  CHECK_THAT(parse_error(text + "\"k40000\": 0}"), HasText("e.json:50001: ") && HasText("k40000"));
}

TEST_CASE("Depth and size are limited") {
  const auto nested = [](std::size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  CHECK_NOTHROW(parse(nested(kMaxJsonDepth)));
  CHECK_THAT(parse_error(nested(kMaxJsonDepth + 1)), HasText("e.json:1: ") && HasText("64"));
  CHECK_THAT(parse_error(std::string(1'000'000, '[')), HasText("64"));
  std::string objects;
  for (int i = 0; i < 100; ++i) objects += "{\"a\":\n";
  CHECK_THAT(parse_error(objects), HasText("e.json:65: ") && HasText("64"));
  CHECK_NOTHROW(parse("1" + std::string(kMaxJsonBytes - 1, ' ')));
  CHECK_THAT(parse_error("1" + std::string(kMaxJsonBytes, ' ')), HasText("16 MiB"));
}

TEST_CASE("Comments are skipped where Hugging Face files are read") {
  const std::string text = "// head\n{ /* two\nlines */ \"a\": 1, // tail\n\"b\": \"// text\"}";
  const JsonDocument document = parse(text, JsonSyntax::comments);
  CHECK(document.root().at("a").line() == 3);
  CHECK(document.root().at("b").as_string() == "// text");
  CHECK_THROWS_AS(parse("{} /* open", JsonSyntax::comments), InputError);
  CHECK_THROWS_AS(parse("// only", JsonSyntax::comments), InputError);
}

TEST_CASE("Accessors say where, what was expected and what was found") {
  const JsonDocument document = parse("{\"gpu\":\n{\"count\": -3, \"memory\": \"80\", \"rate\": 3.5, \"on\": true}}");
  const JsonValue& gpu = document.root().at("gpu");
  const JsonValue& count = gpu.at("count");
  const auto count_error = [&](std::int64_t low, std::int64_t high) {
    return message_of([&] { count.as_int(low, high); });
  };
  CHECK(count_error(1, 8) == "e.json:2: /gpu/count: expected an integer from 1 to 8, got -3");
  CHECK(count_error(1, kMax) == "e.json:2: /gpu/count: expected an integer of at least 1, got -3");
  CHECK(count_error(kMin, -4) == "e.json:2: /gpu/count: expected an integer of at most -4, got -3");
  CHECK(message_of([&] { gpu.at("rate").as_int(0, 8); }) ==
        "e.json:2: /gpu/rate: expected an integer from 0 to 8, got 3.5");
  CHECK(message_of([&] { gpu.at("rate").as_real(0, 1); }) ==
        "e.json:2: /gpu/rate: expected a number from 0 to 1, got 3.5");
  CHECK(message_of([&] { gpu.at("on").as_string(); }) == "e.json:2: /gpu/on: expected a string, got true");
  CHECK(message_of([&] { gpu.at("none"); }) == "e.json:2: /gpu: the key \"none\" is missing");
  CHECK(message_of([&] { document.root().items(); }) ==
        "e.json:1: expected an array, got {\"gpu\": {\"count\": -3, \"memory\": \"80\", \"r...");
  CHECK(message_of([&] { gpu.items(); }).starts_with("e.json:2: /gpu: expected an array, got {"));
  CHECK(message_of([&] { count.members(); }) == "e.json:2: /gpu/count: expected an object, got -3");
  CHECK(message_of([&] { count.find("x"); }) == "e.json:2: /gpu/count: expected an object, got -3");
  CHECK(message_of([&] { count.as_bool(); }) == "e.json:2: /gpu/count: expected true or false, got -3");
  CHECK(message_of([&] { count.fail_with("no GPU"); }) == "e.json:2: /gpu/count: no GPU");
  CHECK_THAT(message_of([&] { gpu.at("memory").as_bytes(); }),
             HasText("e.json:2: /gpu/memory: expected a size") && HasText("unit is missing"));
  for (const auto& call :
       std::vector<std::function<void()>>{[&] { count.as_bytes(); }, [&] { count.as_rate(); },
                                          [&] { count.as_flop_rate(); }, [&] { count.as_seconds(); }}) {
    CHECK_THAT(message_of(call), HasText("e.json:2: /gpu/count: expected a ") && HasText("unit"));
  }
}

TEST_CASE("An integral real is an integer, and an integer is a number") {
  CHECK(parse("4096.0").root().as_int(0, kMax) == 4096);
  CHECK(parse("4.096e3").root().as_int(0, kMax) == 4096);
  CHECK(parse("4096").root().as_real(0, 1e9) == 4096.0);
  CHECK_THROWS_AS(parse("4096.5").root().as_int(0, kMax), InputError);
  CHECK_THROWS_AS(parse("1e30").root().as_int(kMin, kMax), InputError);
  CHECK_THROWS_AS(parse("9223372036854775808.0").root().as_int(kMin, kMax), InputError);
  CHECK(parse("-9223372036854775808.0").root().as_int(kMin, kMax) == kMin);
  CHECK_THROWS_AS(parse("\"1\"").root().as_int(0, 8), InputError);
  CHECK_THROWS_AS(parse("true").root().as_real(0, 8), InputError);
}

TEST_CASE("require_only names the unknown key, its line and the nearest known one") {
  const JsonDocument document = parse("{\"gpu\": {\"name\": 1,\n\"memory_bandwith\": 2}}");
  const JsonValue& gpu = document.root().at("gpu");
  CHECK_NOTHROW(gpu.require_only({"memory_bandwith", "name", "x"}));
  CHECK(message_of([&] {
          gpu.require_only({"name", "memory", "memory_bandwidth"});
        }) == "e.json:2: /gpu: unknown key \"memory_bandwith\", did you mean memory_bandwidth?");
  CHECK(message_of([&] { document.root().require_only({}); }) == "e.json:1: unknown key \"gpu\"");
}

TEST_CASE("short_form is one line of JSON, cut inside no character") {
  CHECK(parse("[1, 2.5, \"a\\n\", {\"b\": null}]").root().short_form() == "[1, 2.5, \"a\\n\", {\"b\": null}]");
  for (std::size_t length = 30; length < 60; ++length) {
    std::string text(length, 'x');
    for (int i = 0; i < 20; ++i) text += "é";
    const JsonDocument document = parse("[\"" + text + "\"]");
    for (std::string form : {document.root().short_form(), document.root().items()[0].short_form()}) {
      INFO(form);
      CHECK(form.size() < 60);
      std::erase(form, '"');
      CHECK_NOTHROW(parse('"' + form + '"'));  // the reader refuses half a character
    }
  }
}

TEST_CASE("Files that cannot be read are input errors that name the path") {
  const TemporaryFolder folder;
  const auto read_error = [](const fs::path& path) { return message_of([&] { JsonDocument::read(path); }); };
  const fs::path good = folder.write("good.json", "{\"a\":\n1}");
  CHECK(JsonDocument::read(good).root().at("a").line() == 2);
  CHECK(JsonDocument::read(good).root().file() == good.string());
  CHECK_THAT(read_error(folder.path()), HasText(folder.path().string()) && HasText("directory"));
  CHECK_THAT(read_error(folder.path() / "none.json"), HasText("none.json") && HasText("No such file"));
  CHECK_THAT(read_error(good / "deeper.json"), HasText("deeper.json"));
  for (const char* device : {"/dev/null", "/dev/zero", "/dev/urandom"}) {
    CHECK_THAT(read_error(device), HasText(std::string(device) + ": expected a file or a pipe, got a device"));
  }
  CHECK_THAT(read_error(folder.write("large.json", std::string(kMaxJsonBytes + 1, ' '))), HasText("16 MiB"));
  CHECK_THAT(read_error(folder.write("bad.json", "{\n\n")), HasText("bad.json:2: "));
  CHECK_THAT(read_error(""), HasText("No such file"));
  CHECK_THAT(read_error(folder.write("nul.json", std::string("{}\n\0{", 5))),
             HasText("nul.json:2: ") && HasText("NUL"));
}

TEST_CASE("What a pipe brings is read like a file") {
  const TemporaryFolder folder;
  const fs::path pipe = folder.path() / "pipe.json";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  const auto read_beside = [&](auto write) {
    std::thread writer([&] {
      std::ofstream out(pipe, std::ios::binary);  // waits for the reader
      write(out);
    });
    std::string text;
    const std::string message = message_of([&] { text = read_text_file(pipe.string()); });
    writer.join();
    return message == "no error" ? text : message;
  };
  const std::string large(300'000, 'x');  // more than a pipe holds
  CHECK(read_beside([&](std::ofstream& out) { out << large; }) == large);
  CHECK(read_beside([](std::ofstream&) {}).empty());
  CHECK(read_beside([](std::ofstream& out) {
          out << "[1," << std::flush;
          std::this_thread::sleep_for(std::chrono::milliseconds(50));  // nothing to read, and not the end
          out << "2]";
        }) == "[1,2]");
  // The writer's end breaks once the limit is passed.
  const auto restore = std::signal(SIGPIPE, SIG_IGN);
  CHECK_THAT(read_beside([&](std::ofstream& out) {
               for (std::size_t n = 0; out && n <= 2 * kMaxJsonBytes; n += large.size()) out << large << std::flush;
             }),
             HasText("pipe.json: expected at most 16 MiB"));
  std::signal(SIGPIPE, restore);
  const auto begin = std::chrono::steady_clock::now();
  CHECK_THAT(message_of([&] { JsonDocument::read(pipe); }), HasText("pipe.json: expected a file, got a named pipe"));
  CHECK(std::chrono::steady_clock::now() - begin >= std::chrono::milliseconds(kIdlePipeWait));
}

TEST_CASE("20,000 random mutations of a document parse or throw InputError, and nothing else") {
  constexpr std::string_view kAlphabet = "{}[]\",:\\/*-+.eE0123456789 \n\ttrufalsn\xff\xc3\xa9";
  std::mt19937_64 random(7);
  int parsed = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string text(kMachine);
    const std::size_t num_edits = 1 + random() % 4;
    for (std::size_t edit = 0; edit < num_edits && !text.empty(); ++edit) {
      const std::size_t at = random() % text.size();
      switch (random() % 5) {
        case 0:
          text[at] = static_cast<char>(random() % 256);
          break;
        case 1:
          text.insert(at, 1, kAlphabet[random() % kAlphabet.size()]);
          break;
        case 2:
          text.erase(at, 1 + random() % 8);
          break;
        case 3:
          text.insert(at, text.substr(random() % text.size(), random() % 40));
          break;
        default:
          text.resize(at);
      }
    }
    try {
      const JsonDocument document = parse(text, random() % 2 == 0 ? JsonSyntax::strict : JsonSyntax::comments);
      ++parsed;
      CHECK_FALSE(document.root().short_form().empty());
    } catch (const InputError& error) {
      const std::string_view message = error.what();
      const bool one_line_with_place = message.starts_with("e.json:") && message.find('\n') == std::string_view::npos;
      if (!one_line_with_place) FAIL_CHECK(message);
    }
  }
  CHECK(parsed > 100);  // the mutations are mild enough to reach the tree
}
