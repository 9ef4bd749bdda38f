// The store's messages, and what it takes from strangers.

#include "runtime/process_store.h"

#include "tests/process_support.h"

using namespace zeroplan;
using namespace zeroplan::tests;

TEST_CASE("frames survive any cut, and what is no frame is told apart") {
  const std::string bytes = encode_frame(FrameType::exchange, BodyWriter().number(-5).text("abc").text("").body()) +
                            encode_frame(FrameType::beat);
  for (std::size_t cut = 0; cut <= bytes.size(); ++cut) {
    FrameReader reader(1000);
    std::vector<Frame> frames;
    for (const std::string& part : {bytes.substr(0, cut), bytes.substr(cut)}) {
      reader.append(part);
      while (auto frame = reader.next()) frames.push_back(*frame);
    }
    REQUIRE(frames.size() == 2);
    BodyReader body(frames[0].body);
    CHECK(body.number() == -5);
    CHECK(body.text() == "abc");
    CHECK(body.text() == "");
    CHECK(body.complete());
    CHECK(frames[1].type == FrameType::beat);
  }
  const auto fault_of = [](std::string text) {
    FrameReader reader(10);
    reader.append(text);
    CHECK_FALSE(reader.next());
    return reader.fault();
  };
  CHECK(fault_of("G") == FrameReader::Fault::foreign);
  CHECK(fault_of(encode_frame(FrameType::beat, "12345678901")) == FrameReader::Fault::too_long);
  CHECK(fault_of(encode_frame(FrameType::beat).substr(0, 15)) == FrameReader::Fault::none);
  BodyReader truncated(std::string_view("\5\0\0\0\0\0\0\0ab", 10));
  CHECK(truncated.text() == "");
  CHECK_FALSE(truncated.complete());
}

TEST_CASE("the store survives whatever is sent to it") {
  FileDescriptor listener = listen_tcp(0, "127.0.0.1");
  const int port = port_of(listener.value());
  const ProcessStore store(std::move(listener), {3, "key", 300ms, 300ms, 300ms});
  std::mt19937 random(3);
  const std::string hello = encode_frame(FrameType::hello, encode_hello({"key", 3, 1, {"h", "", 1}}));
  for (int i = 0; i < 300; ++i) {
    Connected connected = connect_tcp("127.0.0.1", port, Clock::now() + 1s, -1);
    REQUIRE(connected.socket.is_open());
    std::string bytes = i % 3 == 0 ? std::string() : hello;
    for (int frame = 0; frame < 3; ++frame) {
      bytes +=
          encode_frame(static_cast<FrameType>(random() % 8), std::string(random() % 40, static_cast<char>(random())));
    }
    if (i % 2 == 0) bytes[random() % bytes.size()] ^= static_cast<char>(1 << random() % 8);
    iovec part{bytes.data(), random() % bytes.size() + 1};
    send_some(connected.socket.value(), {&part, 1});
    if (i % 5 == 0) wait_for(connected.socket.value(), POLLIN, -1, Clock::now() + 2ms);
  }
}
