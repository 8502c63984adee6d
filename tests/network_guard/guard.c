/* Refuses what a program sends beyond this machine, and writes one line for each attempt.
 *
 * Loaded into a program and its children by LD_PRELOAD, so that it also guards programs that are not Python. It
 * does not see programs that are linked statically. DECATHLON_GUARD_LOG names the file of the lines. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void record(const char *what, const char *where) {
    const char *file = getenv("DECATHLON_GUARD_LOG");
    char line[512];
    int length = snprintf(line, sizeof line, "%s %s\n", what, where);
    int out = file ? open(file, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (out < 0) return;
    if (length > (int)sizeof line - 1) length = sizeof line - 1;
    if (write(out, line, length) < 0) abort(); /* an attempt that is not recorded must not pass unseen */
    close(out);
}

static int is_local4(const struct in_addr *address) { return (ntohl(address->s_addr) >> 24) == 127; }

/* Loopback, and every family that stays on this machine. */
static int is_local(const struct sockaddr *address, char *text, size_t size) {
    if (address->sa_family == AF_INET) {
        const struct sockaddr_in *to = (const struct sockaddr_in *)address;
        inet_ntop(AF_INET, &to->sin_addr, text, size);
        return is_local4(&to->sin_addr);
    }
    if (address->sa_family == AF_INET6) {
        const struct sockaddr_in6 *to = (const struct sockaddr_in6 *)address;
        struct in_addr mapped;
        inet_ntop(AF_INET6, &to->sin6_addr, text, size);
        memcpy(&mapped, &to->sin6_addr.s6_addr[12], sizeof mapped);
        return IN6_IS_ADDR_LOOPBACK(&to->sin6_addr) ||
               (IN6_IS_ADDR_V4MAPPED(&to->sin6_addr) && is_local4(&mapped));
    }
    return 1;
}

int connect(int socket, const struct sockaddr *address, socklen_t length) {
    static int (*next)(int, const struct sockaddr *, socklen_t);
    char text[INET6_ADDRSTRLEN];
    if (!next) next = dlsym(RTLD_NEXT, "connect");
    if (address && !is_local(address, text, sizeof text)) {
        record("connect", text);
        errno = ENETUNREACH;
        return -1;
    }
    return next(socket, address, length);
}

ssize_t sendto(int socket, const void *data, size_t size, int flags, const struct sockaddr *to, socklen_t length) {
    static ssize_t (*next)(int, const void *, size_t, int, const struct sockaddr *, socklen_t);
    char text[INET6_ADDRSTRLEN];
    if (!next) next = dlsym(RTLD_NEXT, "sendto");
    if (to && !is_local(to, text, sizeof text)) {
        record("sendto", text);
        errno = ENETUNREACH;
        return -1;
    }
    return next(socket, data, size, flags, to, length);
}

int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    static int (*next)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
    struct addrinfo numeric = {.ai_flags = AI_NUMERICHOST}, *parsed;
    char own[256] = "";
    if (!next) next = dlsym(RTLD_NEXT, "getaddrinfo");
    gethostname(own, sizeof own - 1);
    if (name && *name && strcmp(name, "localhost") && strcmp(name, own)) {
        /* The C library resolves names without calling `connect` above. An address is judged there. */
        if (next(name, NULL, &numeric, &parsed)) {
            record("lookup", name);
            return EAI_NONAME;
        }
        freeaddrinfo(parsed);
    }
    return next(name, service, hints, found);
}
