// The draw, recomputed in the browser. The format is described in src/shoal/people/draw.py.
// SHA-256 is written out because WebCrypto exists only on HTTPS and localhost.

const K = new Uint32Array(64);
const START = new Uint32Array(8);
{
  // The constants are the first 32 bits of the fractions of the primes' cube and square roots.
  let count = 0;
  for (let n = 2; count < 64; n++) {
    let prime = true;
    for (let d = 2; d * d <= n; d++) if (n % d === 0) prime = false;
    if (!prime) continue;
    if (count < 8) START[count] = fraction(n, 2);
    K[count++] = fraction(n, 3);
  }
}

function fraction(n: number, power: 2 | 3): number {
  // floor(root(n) * 2^32) mod 2^32 in whole numbers: floating point lacks the bits.
  const target = BigInt(n) << BigInt(32 * power);
  let low = 0n;
  let high = 1n << 40n;
  while (low < high) {
    const middle = (low + high + 1n) >> 1n;
    if (middle ** BigInt(power) <= target) low = middle;
    else high = middle - 1n;
  }
  return Number(low & 0xffffffffn);
}

export function sha256(text: string): string {
  const bytes = new TextEncoder().encode(text);
  const padded = new Uint8Array(((bytes.length + 8) >> 6) * 64 + 64);
  padded.set(bytes);
  padded[bytes.length] = 0x80;
  const view = new DataView(padded.buffer);
  view.setUint32(padded.length - 8, Math.floor(bytes.length / 0x20000000));
  view.setUint32(padded.length - 4, bytes.length << 3);
  const state = START.slice();
  const w = new Uint32Array(64);
  const turn = (x: number, by: number) => (x >>> by) | (x << (32 - by));
  for (let at = 0; at < padded.length; at += 64) {
    for (let i = 0; i < 16; i++) w[i] = view.getUint32(at + 4 * i);
    for (let i = 16; i < 64; i++) {
      const a = w[i - 15];
      const b = w[i - 2];
      w[i] = w[i - 16] + (turn(a, 7) ^ turn(a, 18) ^ (a >>> 3)) +
        w[i - 7] + (turn(b, 17) ^ turn(b, 19) ^ (b >>> 10));
    }
    let [a, b, c, d, e, f, g, h] = state;
    for (let i = 0; i < 64; i++) {
      const s1 = turn(e, 6) ^ turn(e, 11) ^ turn(e, 25);
      const t1 = (h + s1 + ((e & f) ^ (~e & g)) + K[i] + w[i]) | 0;
      const s0 = turn(a, 2) ^ turn(a, 13) ^ turn(a, 22);
      const t2 = (s0 + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      [h, g, f, e, d, c, b, a] = [g, f, e, (d + t1) | 0, c, b, a, (t1 + t2) | 0];
    }
    [a, b, c, d, e, f, g, h].forEach((v, i) => (state[i] += v));
  }
  return Array.from(state, (v) => v.toString(16).padStart(8, "0")).join("");
}

export interface Entry { member: string; tickets: number; own: string }
export interface Rank { member: string; value: string }
export interface Checked { winners: string[]; ranks: Rank[]; commitment: string; receipts: string[] }

/** Rank the entrants of a draw. */
export function rank(seed: string, list: string, entries: Entry[]): Rank[] {
  const key = sha256(`seed ${seed}\nlist ${list}\n`);
  const ranks = entries.map(({ member, tickets }) => {
    let value = "g"; // above every hash
    for (let j = 1; j <= tickets; j++) {
      const one = sha256(`key ${key}\nticket ${member} ${j}\n`);
      if (one < value) value = one;
    }
    return { member, value };
  });
  const order = (a: string, b: string) => (a < b ? -1 : a > b ? 1 : 0);
  return ranks.sort((a, b) => order(a.value, b.value) || order(a.member, b.member));
}

/** What an entrant keeps of a request. */
export function receipt(event: string, member: string, own: string): string {
  return sha256(`event ${event}\nmember ${member}\nbytes ${own}\n`);
}

/** Recompute a proof. Throws an Error that says what differs. */
export function verify(proof: string): Checked {
  const lines = proof.split("\n");
  if (lines.pop() !== "") throw new Error("the end of the proof is missing");
  let at = 0;
  const next = (word: string): string => {
    const line = lines[at++] ?? "";
    if (!line.startsWith(word + " ")) throw new Error(`line ${at} should begin with "${word}"`);
    return line.slice(word.length + 1);
  };
  if (lines[at++] !== "shoal draw 1") throw new Error("line 1: this is not a proof of a draw");
  const event = next("event");
  next("title");
  const places = Number(next("places"));
  next("closes");
  next("opened");
  const terms = lines.slice(0, at).join("\n") + "\n";
  const commitment = next("commitment");
  const entries: Entry[] = [];
  const listed = [lines[at - 1]];
  const names = new Set<string>();
  let last = "";
  for (let taking = true; at < lines.length && /^(entry|out) /.test(lines[at]); at++) {
    const line = lines[at];
    const parts = line.split(" ");
    const member = parts[1];
    if (parts[0] === "out" && taking) {
      taking = false;
      last = "";
    }
    const whole = taking
      ? /^entry [a-z0-9-]{1,64} [1-9][0-9]{0,3} [0-9a-f]{32}$/.test(line)
      : /^out [a-z0-9-]{1,64} [a-z-]+$/.test(line);
    if (!whole || member <= last || names.has(member)) {
      throw new Error(`line ${at + 1} is not a valid entry, or not in order`);
    }
    if (taking) entries.push({ member, tickets: Number(parts[2]), own: parts[3] });
    names.add(member);
    listed.push(line);
    last = member;
  }
  const list = next("list");
  const seed = next("seed");
  const same = (what: string, found: string, right: string) => {
    if (found !== right) throw new Error(`${what}: the proof says ${found}, the hash is ${right}`);
  };
  same("commitment", commitment, sha256(`${terms}seed ${seed}\n`));
  same("list", list, sha256(listed.join("\n") + "\n"));
  const ranks = rank(seed, list, entries);
  ranks.forEach((r, i) => same("rank", lines[at + i] ?? "", `rank ${i + 1} ${r.member} ${r.value}`));
  if (lines.length !== at + ranks.length) throw new Error("there are more ranks than entrants");
  return {
    winners: ranks.slice(0, places).map((r) => r.member),
    ranks,
    commitment,
    receipts: entries.map((e) => receipt(event, e.member, e.own)),
  };
}
