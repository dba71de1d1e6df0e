// One session: asks the policy, and is worth 1 if it says what the row's `answer` says.
//
//   node agent.ts http://127.0.0.1:8000

import { call, open } from "./leeway.ts";

const session = await open(process.argv[2], process.env.LEEWAY_TOKEN);
const answer = await call(`${session.baseUrl}/chat/completions`, session.apiKey, {
  model: "policy",
  messages: session.task.messages,
});
const said: string = answer.choices[0].message.content ?? "";
await session.close({ score: said.includes(String(session.task.columns.answer)) ? 1 : 0 });
console.log(session.task.taskId, session.task.index, said);
