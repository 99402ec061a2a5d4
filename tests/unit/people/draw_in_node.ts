// Reads proofs as JSON lines on stdin; prints the winners or the error of each.
import { createInterface } from "node:readline";
import { verify } from "../../../web/src/draw.ts";

for await (const line of createInterface({ input: process.stdin })) {
  try {
    const { winners, receipts } = verify(JSON.parse(line));
    console.log(JSON.stringify({ winners, receipts }));
  } catch (error) {
    console.log(JSON.stringify({ error: (error as Error).message }));
  }
}
