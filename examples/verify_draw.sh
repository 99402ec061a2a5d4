#!/bin/sh
# Check the proof of a draw with sha256sum alone: sh examples/verify_draw.sh proof.txt
# It prints the winners. src/shoal/people/draw.py describes the format.
set -eu
LC_ALL=C
export LC_ALL
proof=$1
value() { sed -n "s/^$1 //p" "$proof" | head -n 1; }
hash() { sha256sum | cut -d ' ' -f 1; }
same() {
  if [ "$2" != "$3" ]; then
    echo "$1 differs: the proof says $2, the hash is $3" >&2
    exit 1
  fi
}

commitment=$(value commitment)
list=$(value list)
seed=$(value seed)
same commitment "$commitment" "$({ sed -n '1,6p' "$proof"; echo "seed $seed"; } | hash)"
same list "$list" "$({ echo "commitment $commitment"; grep -E '^(entry|out) ' "$proof" || true; } | hash)"

key=$(printf 'seed %s\nlist %s\n' "$seed" "$list" | hash)
ranks=$(
  { grep '^entry ' "$proof" || true; } | while read -r _ member tickets _; do
    ticket=1
    while [ "$ticket" -le "$tickets" ]; do
      printf '%s %s\n' "$(printf 'key %s\nticket %s %s\n' "$key" "$member" "$ticket" | hash)" "$member"
      ticket=$((ticket + 1))
    done | sort | head -n 1
  done | sort | awk '{ print "rank " NR " " $2 " " $1 }'
)
same ranks "$(grep '^rank ' "$proof" || true)" "$ranks"
printf '%s\n' "$ranks" | awk -v places="$(value places)" 'NF && NR <= places { print $3 }'
