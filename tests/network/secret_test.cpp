// The right to join a world over hosts: the secret, the proofs, and the two sides of the handshake.
#include "network/secret.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <thread>

#include "fabric/channel.h"
#include "fabric/handshake.h"
#include "fabric/place.h"
#include "network/network.h"
#include "support/ranks.h"

namespace switchyard::test {
namespace {

using network::Secret;
using ::testing::HasSubstr;

Secret secret_of(std::string_view text) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(text.data());
  return Secret(bytes, bytes + text.size());
}

network::Secret from(const std::map<std::string, std::string>& variables) {
  return network::secret_from_environment([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

TEST(SecretTest, ComesFromTheEnvironmentWithoutTrailingSpace) {
  EXPECT_EQ(from({{"SWITCHYARD_SECRET", "0123456789abcdef \n"}}), secret_of("0123456789abcdef"));
}

TEST(SecretTest, MissingAndShortOnesAreRefusedWithARemedy) {
  const auto refused = [](const std::map<std::string, std::string>& variables) {
    return error_of(ErrorCode::kInvalidArgument, [&] { from(variables); });
  };
  EXPECT_THAT(refused({}), HasSubstr("SWITCHYARD_SECRET_FILE"));
  EXPECT_THAT(refused({{"SWITCHYARD_SECRET", "short"}}), HasSubstr("has 5 bytes"));
}

TEST(SecretTest, AGivenOneGoesBeforeTheEnvironments) {
  const auto nothing = [](const char*) -> const char* { return nullptr; };
  const auto set = [](const char* name) -> const char* {
    return std::string_view(name) == "SWITCHYARD_SECRET" ? "0123456789abcdef" : nullptr;
  };
  EXPECT_EQ(network::secret_of("another 16 bytes", set), secret_of("another 16 bytes"));
  EXPECT_EQ(network::secret_of("", set), secret_of("0123456789abcdef"));
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [&] { network::secret_of("short", set); }),
              HasSubstr("has 5 bytes; use at least 16"));
  EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [&] { network::secret_of("", nothing); }),
              HasSubstr("SWITCHYARD_SECRET_FILE"));
}

TEST(SecretTest, AFileMustBeTheUsersAlone) {
  std::string path = ::testing::TempDir() + "secretXXXXXX";
  const int fd = ::mkstemp(path.data());
  ASSERT_GE(fd, 0);
  ::close(fd);
  std::ofstream(path) << "0123456789abcdef\n";
  EXPECT_EQ(from({{"SWITCHYARD_SECRET_FILE", path}}), secret_of("0123456789abcdef"));
  ::chmod(path.c_str(), 0644);
  EXPECT_THAT(error_of(ErrorCode::kInvalidFile,
                       [&] {
                         from({{"SWITCHYARD_SECRET_FILE", path}});
                       }),
              HasSubstr("chmod 600"));
  ::unlink(path.c_str());
  EXPECT_THAT(error_of(ErrorCode::kInvalidFile,
                       [&] {
                         from({{"SWITCHYARD_SECRET_FILE", path}});
                       }),
              HasSubstr(path));
}

class HandshakeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!network::is_built_in()) GTEST_SKIP() << "built without libfabric and OpenSSL";
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    listener_ = UniqueFd(ends[0]);
    joiner_ = UniqueFd(ends[1]);
  }

  // Plays the listener until it knows, while `other` is played on this thread.
  ListenerHandshake::State listen(const HandshakeTerms& terms, const std::function<void()>& other) {
    ListenerHandshake::State state = ListenerHandshake::State::kUnderWay;
    std::thread listening([&] {
      ListenerHandshake handshake(terms);
      eventually([&] {
        state = handshake.advance(listener_.get());
        return state != ListenerHandshake::State::kUnderWay;
      });
      disagrees_ = handshake.disagrees();
      rank_ = state == ListenerHandshake::State::kProved ? handshake.rank() : -1;
      listener_.reset();
    });
    other();
    joiner_.reset();
    listening.join();
    return state;
  }
  JoinResult join(const HandshakeTerms& terms, int rank) {
    return join_handshake(joiner_.get(), terms, rank, Clock::now() + kGenerous);
  }

  UniqueFd listener_, joiner_;
  HandshakeTerms terms_{secret_of("a secret of enough bytes"), Purpose::kRendezvous, 4};
  bool disagrees_ = false;
  int rank_ = -1;
};

TEST_F(HandshakeTest, BothSidesProveTheSameSecret) {
  JoinResult result = JoinResult::kNoAnswer;
  EXPECT_EQ(listen(terms_, [&] { result = join(terms_, 3); }), ListenerHandshake::State::kProved);
  EXPECT_EQ(result, JoinResult::kProved);
  EXPECT_EQ(rank_, 3);
}

TEST_F(HandshakeTest, AnotherSecretIsRefusedByTheJoiner) {
  HandshakeTerms other = terms_;
  other.secret = secret_of("another secret, as long");
  JoinResult result = JoinResult::kNoAnswer;
  EXPECT_EQ(listen(terms_, [&] { result = join(other, 3); }), ListenerHandshake::State::kRefused);
  EXPECT_EQ(result, JoinResult::kDisagrees);
  EXPECT_TRUE(disagrees_);
}

TEST_F(HandshakeTest, AnotherSizeOrPurposeIsRefusedByTheListener) {
  HandshakeTerms other = terms_;
  other.purpose = Purpose::kControl;
  JoinResult result = JoinResult::kProved;
  EXPECT_EQ(listen(terms_, [&] { result = join(other, 3); }), ListenerHandshake::State::kRefused);
  EXPECT_EQ(result, JoinResult::kNoAnswer);
  EXPECT_TRUE(disagrees_);
}

// A joiner that has heard a listener's proof cannot send it back as its own.
TEST_F(HandshakeTest, AProofSentBackIsRefused) {
  EXPECT_EQ(listen(terms_,
                   [&] {
                     network::Opening opening;
                     opening.version = kProtocolVersion;
                     opening.purpose = 1;
                     opening.size = 4;
                     opening.nonce = network::random_nonce();
                     ASSERT_EQ(::send(joiner_.get(), &opening, sizeof opening, 0),
                               ssize_t{sizeof opening});
                     network::Challenge challenge;
                     ASSERT_EQ(::recv(joiner_.get(), &challenge, sizeof challenge, MSG_WAITALL),
                               ssize_t{sizeof challenge});
                     const network::Answer answer{challenge.proof};
                     ASSERT_EQ(::send(joiner_.get(), &answer, sizeof answer, 0),
                               ssize_t{sizeof answer});
                     char nothing = 0;
                     EXPECT_EQ(::recv(joiner_.get(), &nothing, 1, 0), 0);
                   }),
            ListenerHandshake::State::kRefused);
  EXPECT_TRUE(disagrees_);
}

TEST_F(HandshakeTest, GarbageIsNoDisagreement) {
  EXPECT_EQ(listen(terms_,
                   [&] {
                     constexpr std::string_view kText = "GET / HTTP/1.1\r\nHost: rank-0\r\n\r\n";
                     ASSERT_EQ(::send(joiner_.get(), kText.data(), kText.size(), 0),
                               static_cast<ssize_t>(kText.size()));
                   }),
            ListenerHandshake::State::kRefused);
  EXPECT_FALSE(disagrees_);
}

TEST(TcpRendezvous, IsAHostAndAPort) {
  EXPECT_EQ(parse_tcp("tcp://node-3:29000").host, "node-3");
  EXPECT_EQ(parse_tcp("tcp://[fe80::1]:29000").host, "fe80::1");
  EXPECT_EQ(parse_tcp("tcp://10.0.0.1:29000").port, "29000");
  for (const char* const bad :
       {"tcp://", "tcp://host", "tcp://:1", "tcp://host:0", "tcp://host:65536", "tcp://host:12x"}) {
    EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [&] { parse_tcp(bad); }),
                HasSubstr("tcp://HOST:PORT"))
        << bad;
  }
}

}  // namespace
}  // namespace switchyard::test
