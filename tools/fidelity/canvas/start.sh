#!/bin/sh
# As user root, which may become another, like upstream's supervisor.
set -eu
su postgres -s /bin/sh -c '/usr/lib/postgresql/15/bin/pg_ctl -w -D /var/lib/postgresql/15/main \
    -o "--config-file=/etc/postgresql/15/main/postgresql.conf" -l /tmp/log start'
psql -U postgres -c 'CREATE ROLE canvas SUPERUSER LOGIN' -c 'CREATE DATABASE canvas_development OWNER canvas' || true
psql -U canvas canvas_development -c 'CREATE TABLE IF NOT EXISTS courses (id serial PRIMARY KEY, name text)'
redis-server --daemonize yes --save ''
exec su canvasuser -s /bin/sh -c '/opt/canvas/.gems/bin/bundle exec rails server -b 0.0.0.0 -p 3000'
