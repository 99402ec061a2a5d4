#include "network/tls/session_identity.h"

#include <random>

#include "network/tls/libssl.h"

namespace shoal::network {
namespace {

constexpr long kBackdatedS = 3600;  // clocks differ a little
constexpr long kValidS = 400L * 24 * 3600;

void require(bool good) {
  if (!good) throw ConnectionLost("OpenSSL could not make a session's key and certificate");
}

std::string textOf(void* bio) {
  char* text = nullptr;
  const long bytes = LibSsl::get().BIO_ctrl(bio, kBioInfo, 0, &text);
  require(bytes > 0 && text != nullptr);
  return {text, static_cast<size_t>(bytes)};
}

void addExtension(void* certificate, int nid, const char* value) {
  const LibSsl& s = LibSsl::get();
  const Scoped extension{s.X509V3_EXT_conf_nid(nullptr, nullptr, nid, value),
                         s.X509_EXTENSION_free};
  require(extension.object != nullptr && s.X509_add_ext(certificate, extension.object, -1) == 1);
}

void describe(void* certificate, void* key) {
  const LibSsl& s = LibSsl::get();
  std::random_device random;
  require(s.X509_set_version(certificate, 2) == 1);  // 2 means version 3
  require(s.ASN1_INTEGER_set(s.X509_get_serialNumber(certificate),
                             static_cast<long>(random() >> 1) + 1) == 1);
  require(s.X509_gmtime_adj(s.X509_getm_notBefore(certificate), -kBackdatedS) != nullptr);
  require(s.X509_gmtime_adj(s.X509_getm_notAfter(certificate), kValidS) != nullptr);
  require(s.X509_set_pubkey(certificate, key) == 1);
  void* name = s.X509_get_subject_name(certificate);
  const auto* text = reinterpret_cast<const unsigned char*>(kSessionServerName);
  require(s.X509_NAME_add_entry_by_txt(name, "CN", kAsciiString, text, -1, -1, 0) == 1);
  require(s.X509_set_issuer_name(certificate, name) == 1);
  addExtension(certificate, kNidBasicConstraints, "critical,CA:FALSE");
  addExtension(certificate, kNidAlternativeName, "DNS:worker.shoal");
}

}  // namespace

Identity makeSessionIdentity() {
  const LibSsl& s = LibSsl::get();
  s.ERR_clear_error();
  const Scoped key{s.EVP_PKEY_Q_keygen(nullptr, nullptr, "EC", "P-256"), s.EVP_PKEY_free};
  const Scoped certificate{s.X509_new(), s.X509_free};
  require(key.object != nullptr && certificate.object != nullptr);
  describe(certificate.object, key.object);
  require(s.X509_sign(certificate.object, key.object, s.EVP_sha256()) > 0);
  const Scoped key_text{s.BIO_new(s.BIO_s_mem()), s.BIO_vfree};
  const Scoped certificate_text{s.BIO_new(s.BIO_s_mem()), s.BIO_vfree};
  require(s.PEM_write_bio_PrivateKey(key_text.object, key.object, nullptr, nullptr, 0, nullptr,
                                     nullptr) == 1);
  require(s.PEM_write_bio_X509(certificate_text.object, certificate.object) == 1);
  return {textOf(key_text.object), textOf(certificate_text.object), ""};
}

}  // namespace shoal::network
