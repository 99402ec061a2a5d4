#include "network/libssl.h"

#include <dlfcn.h>

#include <string>

#include "network/tls.h"

namespace shoal::network {
namespace {

template <typename Function>
void find(void* library, const char* name, Function& function) {
  void* found = dlsym(library, name);
  if (found == nullptr) {
    throw ConnectionLost(std::string("libssl.so.3 has no function ") + name +
                         ": OpenSSL 3 is needed for devices on other machines");
  }
  function = reinterpret_cast<Function>(found);
}

LibSsl load() {
  void* library = dlopen("libssl.so.3", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw ConnectionLost(
        "libssl.so.3 was not found: OpenSSL 3 is needed for devices on other machines");
  }
  LibSsl s{};
#define FIND(name) find(library, #name, s.name)
  FIND(TLS_method);
  FIND(SSL_CTX_new);
  FIND(SSL_CTX_free);
  FIND(SSL_CTX_ctrl);
  FIND(SSL_CTX_set_ciphersuites);
  FIND(SSL_CTX_set_num_tickets);
  FIND(SSL_CTX_use_certificate);
  FIND(SSL_CTX_use_PrivateKey);
  FIND(SSL_CTX_check_private_key);
  FIND(SSL_CTX_get_cert_store);
  FIND(SSL_CTX_set_verify);
  FIND(SSL_CTX_set_default_read_buffer_len);
  FIND(SSL_new);
  FIND(SSL_free);
  FIND(SSL_set_bio);
  FIND(SSL_set_connect_state);
  FIND(SSL_set_accept_state);
  FIND(SSL_set1_host);
  FIND(SSL_do_handshake);
  FIND(SSL_read);
  FIND(SSL_write);
  FIND(SSL_get_error);
  FIND(SSL_key_update);
  FIND(SSL_get_verify_result);
  FIND(SSL_get1_peer_certificate);
  FIND(BIO_new);
  FIND(BIO_f_buffer);
  FIND(BIO_new_socket);
  FIND(BIO_new_mem_buf);
  FIND(BIO_push);
  FIND(BIO_ctrl);
  FIND(BIO_int_ctrl);
  FIND(BIO_test_flags);
  FIND(BIO_free);
  FIND(PEM_read_bio_X509);
  FIND(PEM_read_bio_PrivateKey);
  FIND(X509_STORE_add_cert);
  FIND(X509_free);
  FIND(EVP_PKEY_free);
  FIND(X509_get_subject_name);
  FIND(X509_NAME_get_text_by_NID);
  FIND(X509_verify_cert_error_string);
  FIND(ERR_get_error);
  FIND(ERR_peek_error);
  FIND(ERR_error_string_n);
  FIND(ERR_clear_error);
#undef FIND
  return s;
}

}  // namespace

const LibSsl& LibSsl::get() {
  static const LibSsl library = load();  // after an exception the next call tries again
  return library;
}

}  // namespace shoal::network
