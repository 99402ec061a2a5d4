// The functions of libssl and libcrypto that tls.cpp uses, with the types that OpenSSL 3 documents
// for them. Its objects are opaque to us.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shoal::network {

struct LibSsl {
  // Loads the library at first use. Throws ConnectionLost if there is none.
  static const LibSsl& get();

  const void* (*TLS_method)();
  void* (*SSL_CTX_new)(const void* method);
  void (*SSL_CTX_free)(void* context);
  long (*SSL_CTX_ctrl)(void* context, int command, long number, void* pointer);
  int (*SSL_CTX_set_ciphersuites)(void* context, const char* names);
  int (*SSL_CTX_set_num_tickets)(void* context, size_t count);
  int (*SSL_CTX_use_certificate)(void* context, void* certificate);
  int (*SSL_CTX_use_PrivateKey)(void* context, void* key);
  int (*SSL_CTX_check_private_key)(const void* context);
  void* (*SSL_CTX_get_cert_store)(const void* context);
  void (*SSL_CTX_set_verify)(void* context, int mode, void* callback);
  void (*SSL_CTX_set_default_read_buffer_len)(void* context, size_t bytes);
  void* (*SSL_new)(void* context);
  void (*SSL_free)(void* ssl);
  void (*SSL_set_bio)(void* ssl, void* in, void* out);
  void (*SSL_set_connect_state)(void* ssl);
  void (*SSL_set_accept_state)(void* ssl);
  int (*SSL_set1_host)(void* ssl, const char* name);
  int (*SSL_do_handshake)(void* ssl);
  int (*SSL_read)(void* ssl, void* to, int bytes);
  int (*SSL_write)(void* ssl, const void* from, int bytes);
  int (*SSL_get_error)(const void* ssl, int result);
  int (*SSL_key_update)(void* ssl, int kind);
  long (*SSL_get_verify_result)(const void* ssl);
  void* (*SSL_get1_peer_certificate)(const void* ssl);

  void* (*BIO_new)(const void* method);
  const void* (*BIO_f_buffer)();
  void* (*BIO_new_socket)(int fd, int close);
  void* (*BIO_new_mem_buf)(const void* data, int bytes);
  void* (*BIO_push)(void* first, void* next);
  long (*BIO_ctrl)(void* bio, int command, long number, void* pointer);
  long (*BIO_int_ctrl)(void* bio, int command, long number, int value);
  int (*BIO_test_flags)(const void* bio, int flags);
  int (*BIO_free)(void* bio);
  void* (*PEM_read_bio_X509)(void* bio, void** certificate, void* callback, void* argument);
  void* (*PEM_read_bio_PrivateKey)(void* bio, void** key, void* callback, void* argument);
  int (*X509_STORE_add_cert)(void* store, void* certificate);
  void (*X509_free)(void* certificate);
  void (*EVP_PKEY_free)(void* key);
  void* (*X509_get_subject_name)(const void* certificate);
  int (*X509_NAME_get_text_by_NID)(void* name, int nid, char* text, int bytes);
  const char* (*X509_verify_cert_error_string)(long code);
  unsigned long (*ERR_get_error)();
  unsigned long (*ERR_peek_error)();
  void (*ERR_error_string_n)(unsigned long code, char* text, size_t bytes);
  void (*ERR_clear_error)();
};

// Constants of OpenSSL 3's headers.
inline constexpr int kSslCtrlMode = 33;
inline constexpr int kSslCtrlReadAhead = 41;
inline constexpr int kSslCtrlMinProtocol = 123;
inline constexpr long kTls13 = 0x0304;
inline constexpr long kModeAutoRetry = 4;
inline constexpr int kVerifyPeer = 1, kVerifyFailIfNone = 2;
inline constexpr int kErrorSsl = 1, kErrorWantRead = 2, kErrorWantWrite = 3, kErrorSyscall = 5,
                     kErrorZeroReturn = 6;
inline constexpr unsigned long kErrorUnexpectedEof = 0x0A000126;  // a whole code, of ERR_get_error
inline constexpr int kKeyUpdateNotRequested = 0;
inline constexpr int kBioFlush = 11, kBioBufferSize = 117, kBioNoClose = 0, kBioShouldRetry = 8;
inline constexpr int kNidCommonName = 13, kNidUnit = 18;

}  // namespace shoal::network
