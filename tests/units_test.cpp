#include "models/units.h"

#include <cmath>
#include <limits>
#include <random>

#include "models/error.h"
#include "tests/catch.h"

using namespace zeroplan;
using namespace zeroplan::tests;

namespace {

struct Row {
  std::string text;
  double base;
};

constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

/// A value as people write it: a few digits times a power of ten or two, or any double at all.
double random_base(std::mt19937_64& random, int lowest_exponent, int highest_exponent) {
  const double digits = static_cast<double>(random() % 100'000) / std::pow(10.0, static_cast<double>(random() % 4));
  std::uniform_int_distribution<int> exponent(lowest_exponent, highest_exponent);
  switch (random() % 3) {
    case 0:
      return digits * std::pow(10.0, exponent(random));
    case 1:
      return digits * std::pow(2.0, exponent(random) * 3);
    default:
      return std::generate_canonical<double, 53>(random) * std::pow(10.0, exponent(random));
  }
}

}  // namespace

TEST_CASE("parse_bytes reads decimal and binary units, rounded once") {
  const std::vector<Row> rows = {{"80GB", 80e9},
                                 {"80GiB", 80 * kGiB},
                                 {"80 GiB", 80 * kGiB},
                                 {"1TiB", kTiB},
                                 {"2TB", 2e12},
                                 {"512MiB", 512 * kMiB},
                                 {"512MB", 512e6},
                                 {"4KiB", 4096},
                                 {"4KB", 4000},
                                 {"4kB", 4000},
                                 {"4kiB", 4096},
                                 {"7B", 7},
                                 {"0B", 0},
                                 {"0.5GiB", kGiB / 2},
                                 {".5GB", 5e8},
                                 {"5.GB", 5e9},
                                 {"80.1GB", 80'100'000'000},
                                 {"0.3TB", 300'000'000'000},
                                 {"1e3GB", 1e12},
                                 {"1e+3 GB", 1e12},
                                 {"1.5e-3GB", 1.5e6},
                                 {"16gB", 16e9},
                                 {"16tiB", 16 * kTiB}};
  for (const Row& row : rows) {
    INFO(row.text);
    CHECK(parse_bytes(row.text, "--host-memory").base() == row.base);
  }
}

TEST_CASE("parse_bytes refuses what is not one number and one unit") {
  const std::vector<std::string> texts = {"",
                                          " ",
                                          "80",
                                          "80 ",
                                          "GB",
                                          " 80GB",
                                          "80GB ",
                                          "80  GB",
                                          "80\tGB",
                                          "80G",
                                          "80gb",
                                          "80 gb",
                                          "80Gb",
                                          "80GIB",
                                          "80mB",
                                          "80GB/s",
                                          "-80GB",
                                          "-0GB",
                                          "+80GB",
                                          "nan GB",
                                          "NaNGB",
                                          "inf GB",
                                          "1e400GB",
                                          "1e400B",
                                          "1e308TB",
                                          "1e999999999999999GB",
                                          "1e-400B",
                                          "1,000GB",
                                          "1 000GB",
                                          "0x10GB",
                                          "1..5GB",
                                          "1.5.5GB",
                                          ".GB",
                                          "e5GB",
                                          "1e GB",
                                          "80GB80GB",
                                          "80%",
                                          "80GB\n",
                                          "８０GB",
                                          std::string("80GB\0", 5),
                                          std::string(100'000, '9') + "GB"};
  for (const std::string& text : texts) {
    INFO(text.substr(0, 80));
    CHECK_THROWS_AS(parse_bytes(text, "--host-memory"), InputError);
  }
}

TEST_CASE("A refused size names the flag, the expected form, the text and the nearest unit on one line") {
  CHECK_THROWS_WITH(parse_bytes("80", "--host-memory"),
                    "--host-memory: expected a size such as \"80GB\" or \"80GiB\", got \"80\" (the unit is missing)");
  CHECK_THROWS_WITH(parse_bytes("80gb", "--host-memory"), HasText("did you mean GB"));
  CHECK_THROWS_WITH(parse_bytes("-80GB", "--host-memory"), HasText("negative"));
  CHECK_THROWS_WITH(parse_bytes("1e400GB", "--host-memory"), HasText("out of range"));
  try {
    parse_bytes("8\n0" + std::string(1000, 'x'), "--host-memory");
    FAIL("accepted");
  } catch (const InputError& error) {
    const std::string message = error.what();
    CHECK(message.find('\n') == std::string::npos);
    CHECK(message.size() < 300);
  }
}

TEST_CASE("parse_rate reads bytes and bits a second") {
  const std::vector<Row> rows = {{"6.5GB/s", 6.5e9},     {"3.35 TB/s", 3.35e12}, {"400Gb/s", 50e9},
                                 {"400Gbps", 50e9},      {"400 Gbit/s", 50e9},   {"25GBps", 25e9},
                                 {"32GiB/s", 32 * kGiB}, {"100Mb/s", 12.5e6},    {"1b/s", 0.125}};
  for (const Row& row : rows) {
    INFO(row.text);
    CHECK(parse_rate(row.text, "--nvme").base() == row.base);
  }
  for (const std::string text : {"6.5", "6.5GB", "6.5GB /s", "6.5GB/h", "-1GB/s", "1e400GB/s", "1e300TB/s"}) {
    INFO(text);
    if (text == "1e300TB/s") {
      CHECK_THROWS_WITH(parse_rate(text, "--nvme"), HasText("out of range"));
    } else {
      CHECK_THROWS_AS(parse_rate(text, "--nvme"), InputError);
    }
  }
}

TEST_CASE("parse_flop_rate and parse_seconds read their units") {
  CHECK(parse_flop_rate("989 TFLOPS", "f").base() == 989e12);
  CHECK(parse_flop_rate("1.2 PFLOPS", "f").base() == 1.2e15);
  CHECK(parse_flop_rate("19.5 TFLOP/s", "f").base() == 19.5e12);
  CHECK_THROWS_AS(parse_flop_rate("989", "f"), InputError);
  CHECK_THROWS_AS(parse_flop_rate("989 TB/s", "f"), InputError);
  CHECK(parse_seconds("1.5us", "t").base() == 1.5e-6);
  CHECK(parse_seconds("1.5\u00b5s", "t").base() == 1.5e-6);
  CHECK(parse_seconds("3 ms", "t").base() == 3e-3);
  CHECK(parse_seconds("2s", "t").base() == 2);
  CHECK(parse_seconds("20ns", "t").base() == 20e-9);
  CHECK_THROWS_AS(parse_seconds("2", "t"), InputError);
  CHECK_THROWS_AS(parse_seconds("2m", "t"), InputError);
}

TEST_CASE("parse_integer takes whole numbers in range and nothing else") {
  CHECK(parse_integer("0", "--ranks", 0, 8) == 0);
  CHECK(parse_integer("-3", "--ranks", -3, 8) == -3);
  CHECK(parse_integer("9223372036854775807", "--ranks", 0, kMax) == kMax);
  CHECK(parse_integer("-9223372036854775808", "--ranks", kMin, kMax) == kMin);
  for (const std::string text : {"", " 1", "1 ", "+1", "1.0", "1e3", "0x1", "9", "-1", "9223372036854775808", "one"}) {
    INFO(text);
    CHECK_THROWS_AS(parse_integer(text, "--ranks", 0, 8), InputError);
  }
  CHECK_THROWS_WITH(parse_integer("9", "--ranks", 1, 8), "--ranks: expected a whole number from 1 to 8, got \"9\"");
  CHECK_THROWS_WITH(parse_integer("0", "--ranks", 1, kMax), HasText("at least 1"));
}

TEST_CASE("to_text is short where the value is round and parses back to the same bits") {
  CHECK(to_text(80_GiB) == "80 GiB");
  CHECK(to_text(80_GB) == "80 GB");
  CHECK(to_text(Bytes(1024)) == "1 KiB");
  CHECK(to_text(Bytes(0)) == "0 B");
  CHECK(to_text(Bytes(68'976'648'192)) == "68976648192 B");
  CHECK(to_text(2039_GBps) == "2039 GB/s");
  CHECK(to_text(312.0_TFLOPS) == "312 TFLOPS");
  CHECK(to_text(FlopsPerSecond(989.4e12)) == "989.4 TFLOPS");
  CHECK(to_text(parse_seconds("3.4us", "t")) == "3.4 us");

  std::mt19937_64 random(20260801);
  for (int i = 0; i < 20'000; ++i) {
    const Bytes bytes(random_base(random, 0, 15));
    const BytesPerSecond rate(random_base(random, 0, 13));
    const FlopsPerSecond flops(random_base(random, 6, 18));
    const Seconds time(random_base(random, -9, 3));
    INFO(to_text(bytes) << ", " << to_text(rate) << ", " << to_text(flops) << ", " << to_text(time));
    const bool same = parse_bytes(to_text(bytes), "b") == bytes && parse_rate(to_text(rate), "r") == rate &&
                      parse_flop_rate(to_text(flops), "f") == flops && parse_seconds(to_text(time), "t") == time;
    REQUIRE(same);
  }
}

TEST_CASE("to_text parses back at the ends of the double range") {
  for (const double base : {5e-324, 2.2250738585072014e-308, 1e-10, 0.1, 1.0 / 3, 9007199254740993.0, 1e22, 1e300,
                            std::numeric_limits<double>::max()}) {
    INFO(to_text(Bytes(base)));
    CHECK(parse_bytes(to_text(Bytes(base)), "b").base() == base);
    CHECK(parse_seconds(to_text(Seconds(base)), "t").base() == base);
  }
}

TEST_CASE("Numbers for people: GiB with one decimal, times and rates with three digits") {
  CHECK(format_gib(Bytes(771.4 * kGiB)) == "771.4 GiB");
  CHECK(format_gib(80_GB) == "74.5 GiB");
  CHECK(format_gib(Bytes(-1)) == "0.0 GiB");

  CHECK(format_seconds(1.239_s) == "1.24 s");
  CHECK(format_seconds(12.4_ms) == "12.4 ms");
  CHECK(format_seconds(950.0_us) == "950 us");
  CHECK(format_seconds(0.99996_s) == "1.00 s");
  CHECK(format_seconds(Seconds(999.6e-6)) == "1.00 ms");
  CHECK(format_seconds(99.96_s) == "100 s");
  CHECK(format_seconds(1234.4_s) == "1234 s");
  CHECK(format_seconds(0.0_s) == "0 s");
  CHECK(format_seconds(Seconds(-0.5)) == "-500 ms");

  CHECK(format_rate(235_GBps) == "235 GB/s");
  CHECK(format_rate(6.5_GBps) == "6.50 GB/s");
  CHECK(format_rate(3350_GBps) == "3350 GB/s");

  CHECK(format_count(68'976'648'192) == "68,976,648,192");
  CHECK(format_count(0) == "0");
  CHECK(format_count(999) == "999");
  CHECK(format_count(-1000) == "-1,000");
  CHECK(format_count(kMin) == "-9,223,372,036,854,775,808");
}

TEST_CASE("Elements become bytes by their type") {
  CHECK(bytes_of(3, DType::bf16) == 6_B);
  CHECK(bytes_of(3, DType::fp32) == 12_B);
  CHECK(bytes_of(3, DType::i64) == 24_B);
  for (const DType type : {DType::bf16, DType::fp16, DType::fp32, DType::u8, DType::i32, DType::i64}) {
    CHECK(size_of(type) > 0);
    CHECK_FALSE(to_string(type).empty());
  }
  CHECK(to_string(DType::bf16) == "bf16");
}
