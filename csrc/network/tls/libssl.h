// The functions of libssl and libcrypto that Shoal uses, with the types that OpenSSL 3 documents
// for them. Its objects are opaque to us.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shoal::network {

// Result, name and parameters of each function.
#define SHOAL_LIBSSL(FUNCTION)                                                                    \
  FUNCTION(const void*, TLS_method, ())                                                           \
  FUNCTION(void*, SSL_CTX_new, (const void* method))                                              \
  FUNCTION(void, SSL_CTX_free, (void* context))                                                   \
  FUNCTION(long, SSL_CTX_ctrl, (void* context, int command, long number, void* pointer))          \
  FUNCTION(int, SSL_CTX_set_ciphersuites, (void* context, const char* names))                     \
  FUNCTION(int, SSL_CTX_set_num_tickets, (void* context, size_t count))                           \
  FUNCTION(int, SSL_CTX_use_certificate, (void* context, void* certificate))                      \
  FUNCTION(int, SSL_CTX_use_PrivateKey, (void* context, void* key))                               \
  FUNCTION(int, SSL_CTX_check_private_key, (const void* context))                                 \
  FUNCTION(void*, SSL_CTX_get_cert_store, (const void* context))                                  \
  FUNCTION(void, SSL_CTX_set_verify, (void* context, int mode, void* callback))                   \
  FUNCTION(void, SSL_CTX_set_default_read_buffer_len, (void* context, size_t bytes))              \
  FUNCTION(void*, SSL_new, (void* context))                                                       \
  FUNCTION(void, SSL_free, (void* ssl))                                                           \
  FUNCTION(void, SSL_set_bio, (void* ssl, void* in, void* out))                                   \
  FUNCTION(void, SSL_set_connect_state, (void* ssl))                                              \
  FUNCTION(void, SSL_set_accept_state, (void* ssl))                                               \
  FUNCTION(int, SSL_set1_host, (void* ssl, const char* name))                                     \
  FUNCTION(int, SSL_do_handshake, (void* ssl))                                                    \
  FUNCTION(int, SSL_read, (void* ssl, void* to, int bytes))                                       \
  FUNCTION(int, SSL_write, (void* ssl, const void* from, int bytes))                              \
  FUNCTION(int, SSL_get_error, (const void* ssl, int result))                                     \
  FUNCTION(int, SSL_key_update, (void* ssl, int kind))                                            \
  FUNCTION(long, SSL_get_verify_result, (const void* ssl))                                        \
  FUNCTION(void*, SSL_get1_peer_certificate, (const void* ssl))                                   \
  FUNCTION(void*, BIO_new, (const void* method))                                                  \
  FUNCTION(const void*, BIO_f_buffer, ())                                                         \
  FUNCTION(void*, BIO_new_socket, (int fd, int close))                                            \
  FUNCTION(void*, BIO_new_mem_buf, (const void* data, int bytes))                                 \
  FUNCTION(void*, BIO_push, (void* first, void* next))                                            \
  FUNCTION(long, BIO_ctrl, (void* bio, int command, long number, void* pointer))                  \
  FUNCTION(long, BIO_int_ctrl, (void* bio, int command, long number, int value))                  \
  FUNCTION(int, BIO_test_flags, (const void* bio, int flags))                                     \
  FUNCTION(void, BIO_vfree, (void* bio))                                                          \
  FUNCTION(void*, PEM_read_bio_X509,                                                              \
           (void* bio, void** certificate, void* callback, void* argument))                       \
  FUNCTION(void*, PEM_read_bio_PrivateKey,                                                        \
           (void* bio, void** key, void* callback, void* argument))                               \
  FUNCTION(int, X509_STORE_add_cert, (void* store, void* certificate))                            \
  FUNCTION(void, X509_free, (void* certificate))                                                  \
  FUNCTION(int, X509_cmp, (const void* one, const void* other))                                   \
  FUNCTION(void, EVP_PKEY_free, (void* key))                                                      \
  FUNCTION(void*, X509_get_subject_name, (const void* certificate))                               \
  FUNCTION(int, X509_NAME_get_text_by_NID, (void* name, int nid, char* text, int bytes))          \
  FUNCTION(const char*, X509_verify_cert_error_string, (long code))                               \
  FUNCTION(unsigned long, ERR_get_error, ())                                                      \
  FUNCTION(unsigned long, ERR_peek_error, ())                                                     \
  FUNCTION(void, ERR_error_string_n, (unsigned long code, char* text, size_t bytes))              \
  FUNCTION(void, ERR_clear_error, ())                                                             \
  /* to make a key and a certificate: */                                                          \
  FUNCTION(void*, EVP_PKEY_Q_keygen, (void* library, const char* query, const char* type, ...))   \
  FUNCTION(void*, X509_new, ())                                                                   \
  FUNCTION(int, X509_set_version, (void* certificate, long version))                              \
  FUNCTION(void*, X509_get_serialNumber, (void* certificate))                                     \
  FUNCTION(int, ASN1_INTEGER_set, (void* number, long value))                                     \
  FUNCTION(void*, X509_getm_notBefore, (const void* certificate))                                 \
  FUNCTION(void*, X509_getm_notAfter, (const void* certificate))                                  \
  FUNCTION(void*, X509_gmtime_adj, (void* time, long seconds))                                    \
  FUNCTION(int, X509_set_pubkey, (void* certificate, void* key))                                  \
  FUNCTION(int, X509_set_issuer_name, (void* certificate, const void* name))                      \
  FUNCTION(int, X509_NAME_add_entry_by_txt,                                                       \
           (void* name, const char* field, int type, const unsigned char* text, int bytes,        \
            int place, int set))                                                                  \
  FUNCTION(void*, X509V3_EXT_conf_nid, (void* config, void* context, int nid, const char* value)) \
  FUNCTION(int, X509_add_ext, (void* certificate, void* extension, int place))                    \
  FUNCTION(void, X509_EXTENSION_free, (void* extension))                                          \
  FUNCTION(const void*, EVP_sha256, ())                                                           \
  FUNCTION(int, X509_sign, (void* certificate, void* key, const void* digest))                    \
  FUNCTION(const void*, BIO_s_mem, ())                                                            \
  FUNCTION(int, PEM_write_bio_X509, (void* bio, const void* certificate))                         \
  FUNCTION(int, PEM_write_bio_PrivateKey,                                                         \
           (void* bio, const void* key, const void* cipher, const unsigned char* password,        \
            int bytes, void* callback, void* argument))

struct LibSsl {
  // Loads the library at first use. Throws ConnectionLost if there is none.
  static const LibSsl& get();

#define FIELD(result, name, parameters) result(*name) parameters;
  SHOAL_LIBSSL(FIELD)
#undef FIELD
};

// Owns an OpenSSL object for the length of a scope.
struct Scoped {
  void* object;
  void (*drop)(void*);
  ~Scoped() {
    if (object != nullptr) drop(object);
  }
};

// Constants of OpenSSL 3's headers.
inline constexpr int kSslCtrlMode = 33;
inline constexpr int kSslCtrlReadAhead = 41;
inline constexpr int kSslCtrlMinProtocol = 123;
inline constexpr long kTls13 = 0x0304;
inline constexpr long kModeAutoRetry = 4;
inline constexpr int kVerifyPeer = 1, kVerifyFailIfNone = 2;
inline constexpr int kErrorWantRead = 2, kErrorWantWrite = 3, kErrorSyscall = 5,
                     kErrorZeroReturn = 6;
inline constexpr unsigned long kErrorUnexpectedEof = 0x0A000126;  // a whole code, of ERR_get_error
inline constexpr int kKeyUpdateNotRequested = 0;
inline constexpr int kBioInfo = 3, kBioFlush = 11, kBioBufferSize = 117, kBioNoClose = 0,
                     kBioShouldRetry = 8;
inline constexpr int kNidCommonName = 13, kNidUnit = 18, kNidAlternativeName = 85,
                     kNidBasicConstraints = 87;
inline constexpr int kAsciiString = 0x1001;

}  // namespace shoal::network
